"""Our file of a profile: what is written is read again, and what is not ours or is damaged is refused."""

from __future__ import annotations

import io
import zipfile

import msgspec
import numpy as np
import pytest

from moestro.core.experts.expert_load import ExpertLoad, LayerPairs
from moestro.errors import ConfigError
from moestro.workload.experts.expert_profile import (
    CREATED_BY,
    ExpertProfile,
    read_profile_file,
    with_layers,
    write_profile,
)


def profile(seed: int = 0, *, has_pairs: bool = True) -> ExpertProfile:
    rng = np.random.default_rng(seed)
    num_sources, num_layers, num_experts = 2, 3, 5
    pairs = LayerPairs(
        rng.integers(0, 2, 7, np.int32), rng.integers(0, 5, 7, np.int32), rng.integers(0, 5, 7, np.int32), rng.random(7)
    )
    load = ExpertLoad(
        rng.random((num_sources, num_layers, num_experts)), rng.random((num_layers, num_experts)),
        rng.random((num_layers, num_experts)), 12.5, pairs if has_pairs else None,
    )  # fmt: skip
    return ExpertProfile(
        load=load, layers=(1, 2, 4), num_model_layers=6, model="a-network", origin="a test", notes=("one", "two")
    )


@pytest.mark.parametrize("has_pairs", [True, False])
def test_a_profile_is_read_as_it_was_written(tmp_path, has_pairs):
    path, made = tmp_path / "p.moestro", profile(has_pairs=has_pairs)
    write_profile(path, made)
    found = read_profile_file(path)
    for name in ("layers", "num_model_layers", "model", "origin", "notes", "created_by"):
        assert getattr(found, name) == getattr(made, name)
    assert found.created_by == CREATED_BY
    assert found.load.num_steps == 12.5
    for name in ("tokens", "variance", "activated"):
        assert (getattr(found.load, name) == getattr(made.load, name)).all()
    assert (found.load.pairs is not None) == has_pairs
    for name in ("layer", "expert", "next_expert", "count") if has_pairs else ():
        assert (getattr(found.load.pairs, name) == getattr(made.load.pairs, name)).all()


def test_equal_profiles_are_equal_files(tmp_path):
    for name in ("a", "b"):
        write_profile(tmp_path / name, profile())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path):
    path = tmp_path / "p"
    write_profile(path, profile())
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError):
            read_profile_file(path)


def test_a_changed_byte_is_refused_or_changes_nothing(tmp_path):
    path = tmp_path / "p"
    write_profile(path, profile())
    whole = path.read_bytes()
    made = profile()
    for place in range(0, len(whole), 53):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            found = read_profile_file(path)
        except ConfigError:
            continue
        assert (found.load.tokens == made.load.tokens).all()  # the byte was a date or an attribute of the zip


def changed(path, header=(), **arrays):
    write_profile(path, profile())
    with np.load(path) as members:
        contents = dict(members)
    fields = msgspec.json.decode(contents["header"].tobytes()) | dict(header)
    contents |= {"header": np.frombuffer(msgspec.json.encode(fields), np.uint8), **arrays}
    with path.open("wb") as file:
        np.savez(file, **{name: array for name, array in contents.items() if array is not None})


@pytest.mark.parametrize(
    ("header", "arrays", "words"),
    [
        ({"version": 2}, {}, "version 2; this Moestro reads version 1"),
        ({"form": "other"}, {}, "has the form 'other'"),
        ({"num_experts": 9}, {}, "the header"),
        ({"layers": [1, 2]}, {}, "the header"),
        ({"layers": [1, 2, 2]}, {}, "layer numbers must grow"),
        ({"layers": "x"}, {}, "damaged header"),
        ({}, {"variance": None}, "lacks variance"),
        ({}, {"activated": np.full((3, 5), np.nan)}, "activated has a figure"),
        ({}, {"tokens": np.full((2, 3, 5), -1.0)}, "tokens has a figure"),
        ({}, {"pairs_expert": np.full(7, 5, np.int32)}, "pairs_expert must have whole numbers below 5"),
        ({}, {"pairs_layer": np.full(7, 2, np.int32)}, "pairs_layer must have whole numbers below 2"),
        ({}, {"pairs_count": np.zeros(3)}, "different lengths"),
    ],
)
def test_contents_that_do_not_fit_are_refused(tmp_path, header, arrays, words):
    changed(tmp_path / "p", header, **arrays)
    with pytest.raises(ConfigError, match=words):
        read_profile_file(tmp_path / "p")


def test_a_pickle_inside_is_never_loaded(tmp_path):
    packed = io.BytesIO()
    np.save(packed, np.array([{}], object), allow_pickle=True)
    write_profile(tmp_path / "p", profile())
    with zipfile.ZipFile(tmp_path / "p") as members:
        contents = {name: members.read(name) for name in members.namelist()}
    with zipfile.ZipFile(tmp_path / "p", "w") as members:
        for name, data in (contents | {"tokens.npy": packed.getvalue()}).items():
            members.writestr(name, data)
    with pytest.raises(ConfigError, match="damaged"):
        read_profile_file(tmp_path / "p")


def test_pairs_of_layers_that_are_left_out_are_left_out():
    found = with_layers(profile(), np.array([False, True, True]))
    assert found.layers == (2, 4)
    made = profile().load.pairs
    kept = made.layer == 1
    assert (found.load.pairs.layer == 0).all()
    assert found.load.pairs.expert.tolist() == made.expert[kept].tolist()
    alone = with_layers(profile(), np.array([True, False, True]))
    assert not len(alone.load.pairs.count)
