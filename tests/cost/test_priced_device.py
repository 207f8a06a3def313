"""A priced device takes as long as the model says, one item after the other, and answers from scripts by position."""

import numpy as np
import pytest

from moestro.core.script import Script
from moestro.core.work import LOGITS_LAST, LOGITS_NONE, SAMPLING_ROW, BlockMoves, Forward, Units
from moestro.cost.priced_device import PricedDevice, ScriptedDevice
from moestro.errors import InvariantError

BLOCK = 4


class TokenCost:
    """100 ns a step and 1 ns a token; 10 ns for each that is copied."""

    def move_ns(self, num_tokens: int) -> int:
        return 10 * num_tokens

    def step_ns(self, batch) -> int:
        return 100 + int(batch.num_tokens.sum())

    def decode_steps_ns(self, start, num_steps: int):
        return np.full(num_steps, 100 + len(start), np.int64)


def hashes(*names: int) -> bytes:
    return b"".join(bytes([name]) * 16 for name in names)


def forward(*rows: tuple[int, int, int, int, bool]) -> Forward:
    """Rows of (slot, serial, start, number of tokens, whether a token is sampled)."""
    slot, serial, start, num_tokens, samples = (np.array(column) for column in zip(*rows, strict=True))
    start = start.astype(np.int32)
    return Forward(
        Units(
            slot=slot.astype(np.int32),
            serial=serial.astype(np.int64),
            service_class=np.zeros(len(rows), np.uint8),
            start=start,
            num_tokens=num_tokens.astype(np.int32),
            write_start=start,
            logits=np.where(samples, LOGITS_LAST, LOGITS_NONE).astype(np.uint8),
            block_tables=np.zeros((len(rows), 1), np.int32),
            sampling=np.zeros(len(rows), SAMPLING_ROW),
            token_ids=None,
        )
    )


def device_with(*scripts: Script) -> PricedDevice:
    device = PricedDevice(TokenCost(), BLOCK)
    for serial, script in enumerate(scripts):
        device.expect(serial, script)
    return device


def run(device: PricedDevice, *rows):
    """The result of launching `rows` on an idle device."""
    device.launch(forward(*rows), 0)
    (result,) = device.poll(device.ready_at_ns())
    return result


def test_items_take_what_the_model_says_one_after_the_other():
    device = device_with(Script(9), Script(9))
    assert device.ready_at_ns() is None
    device.launch(forward((0, 0, 0, 5, True)), 1000)
    device.launch(forward((1, 1, 0, 7, True)), 1001)
    assert device.ready_at_ns() == 1105
    assert device.poll(1104) == []
    assert [result.slot.tolist() for result in device.poll(1105)] == [[0]]
    assert device.ready_at_ns() == 1105 + 107
    assert [result.slot.tolist() for result in device.poll(5000)] == [[1]]
    device.launch(forward((0, 0, 5, 1, True)), 6000)
    assert device.ready_at_ns() == 6101


def test_copies_are_priced_with_the_item_after_them():
    device = device_with(Script(9))
    device.move_blocks(BlockMoves(np.array([[1, 2], [0, 1]]), np.array([[5], [3]])), 1000)
    device.launch(forward((0, 0, 0, 5, True)), 1000)
    assert device.ready_at_ns() == 1105 + 10 * 3 * BLOCK
    device.poll(5000)
    device.launch(forward((0, 0, 5, 1, True)), 6000)
    assert device.ready_at_ns() == 6101


def test_a_sequence_ends_with_the_last_token_of_its_script():
    device = device_with(Script(3), Script(1))
    assert run(device, (0, 0, 0, 5, False), (1, 1, 0, 4, True)).finished.tolist() == [False, True]
    assert run(device, (0, 0, 5, 2, True)).finished.tolist() == [False]
    assert run(device, (0, 0, 7, 1, True)).finished.tolist() == [False]
    assert run(device, (0, 0, 8, 1, True)).finished.tolist() == [True]


def test_hashes_come_with_the_step_that_fills_the_block():
    device = device_with(Script(9, hashes(1, 2)))
    assert run(device, (0, 0, 0, 6, True)).block_hashes == {}
    assert run(device, (0, 0, 6, 1, True)).block_hashes == {}
    assert run(device, (0, 0, 7, 1, True)).block_hashes == {0: hashes(1)}, "the block with the prompt's last tokens"
    for start in (8, 9, 10):
        assert run(device, (0, 0, start, 1, True)).block_hashes == {}
    assert run(device, (0, 0, 11, 1, True)).block_hashes == {0: hashes(2)}
    assert run(device, (0, 0, 12, 1, True)).block_hashes == {}


def test_a_preempted_sequence_goes_on_where_it_was_in_another_slot_and_back():
    device = device_with(Script(6, hashes(1, 2, 3)), Script(99))
    assert run(device, (0, 0, 0, 4, True)).block_hashes == {}
    for start in (4, 5, 6):
        run(device, (0, 0, start, 1, True))
    assert run(device, (0, 0, 7, 1, True)).block_hashes == {0: hashes(1)}
    # Its five generated tokens are prompt now; another sequence has taken slot 0.
    assert run(device, (0, 1, 0, 3, True), (20, 0, 0, 8, False)).block_hashes == {}, "it is not told again"
    assert run(device, (20, 0, 8, 1, False)).finished.tolist() == [False]
    device.forget(1)
    result = run(device, (0, 0, 0, 9, True))
    assert result.finished.tolist() == [True], "the sixth token, wherever it is computed"
    assert result.block_hashes == {}


def test_steps_until_finish_and_their_hashes():
    device = device_with(Script(8, hashes(1, 2)), Script(5))
    run(device, (3, 0, 0, 6, True), (40, 1, 0, 2, True))
    slots, computed = np.array([3, 40], np.int32), np.array([6, 2], np.int32)
    assert device.steps_until_finish(slots, computed) == 4, "the last of which ends sequence 1"
    assert device.decode_steps_ns(computed, 3).tolist() == [102, 102, 102]
    assert device.complete_steps(slots, computed, 3) == ({3: hashes(1)}, [])
    assert device.steps_until_finish(slots, computed + 3) == 1
    assert device.complete_steps(slots, computed + 3, 1) == ({}, [40])


def test_a_prompt_that_is_not_over_has_to_be_launched():
    device = device_with(Script(8))
    run(device, (0, 0, 0, 6, False))
    assert device.steps_until_finish(np.array([0], np.int32), np.array([6], np.int32)) == 0
    assert device.steps_until_finish(np.array([99], np.int32), np.array([6], np.int32)) == 0
    assert device.steps_until_finish(np.array([], np.int32), np.array([], np.int32)) == 0


def test_a_sequence_without_a_script_is_a_bug_of_the_driver():
    device = device_with(Script(1))
    with pytest.raises(InvariantError, match="no script for sequence 7"):
        device.launch(forward((0, 7, 0, 3, True)), 0)
    with pytest.raises(InvariantError, match="sequence 0 has a script already"):
        device.expect(0, Script(2))
    device.forget(0)
    device.forget(0)
    with pytest.raises(InvariantError, match="no script for sequence 0"):
        device.launch(forward((0, 0, 0, 3, True)), 0)


def test_a_scripted_device_waits_for_its_driver_to_price_the_step():
    device = ScriptedDevice(BLOCK)
    device.expect(0, Script(1))
    device.launch(forward((0, 0, 0, 3, True)), 0)
    assert device.batch.num_tokens.tolist() == [3]
    assert device.ready_at_ns() is None
    assert device.poll(10**18) == []
    with pytest.raises(InvariantError, match="launched twice"):
        device.launch(forward((0, 0, 3, 1, True)), 0)
    device.finish_at(500)
    assert device.batch is None
    assert device.ready_at_ns() == 500
    assert device.poll(500)[0].finished.tolist() == [True]
    with pytest.raises(InvariantError, match="finish_at without"):
        device.finish_at(600)
