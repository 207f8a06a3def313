"""A priced device takes as long as the model says, one item after the other, and answers from scripts by position."""

import numpy as np
import pytest

from moestro.core.request import Script
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


def device_with(*jobs: tuple[Script, int]) -> PricedDevice:
    """Jobs are scripts with the lengths of their prompts."""
    device = PricedDevice(TokenCost(), BLOCK)
    for serial, (script, num_prompt_tokens) in enumerate(jobs):
        device.expect(serial, script, num_prompt_tokens)
    return device


def run(device: PricedDevice, *rows):
    """The result of launching `rows` on an idle device."""
    device.launch(forward(*rows), 0)
    (result,) = device.poll(device.ready_at_ns())
    return result


def test_items_take_what_the_model_says_one_after_the_other():
    device = device_with((Script(9), 5), (Script(9), 7))
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
    device = device_with((Script(9), 5))
    device.move_blocks(BlockMoves(np.array([[1, 2], [0, 1]]), np.array([[5], [3]])), 1000)
    device.launch(forward((0, 0, 0, 5, True)), 1000)
    assert device.ready_at_ns() == 1105 + 10 * 3 * BLOCK
    device.poll(5000)
    device.launch(forward((0, 0, 5, 1, True)), 6000)
    assert device.ready_at_ns() == 6101


def test_hashes_come_with_the_step_that_fills_the_block():
    device = device_with((Script(9, hashes(1, 2)), 6))
    assert run(device, (0, 0, 0, 6, True)).block_hashes == {}
    assert run(device, (0, 0, 6, 1, True)).block_hashes == {}
    assert run(device, (0, 0, 7, 1, True)).block_hashes == {0: hashes(1)}, "the block with the prompt's last tokens"
    for start in (8, 9, 10):
        assert run(device, (0, 0, start, 1, True)).block_hashes == {}
    assert run(device, (0, 0, 11, 1, True)).block_hashes == {0: hashes(2)}
    assert run(device, (0, 0, 12, 1, True)).block_hashes == {}


def test_a_preempted_sequence_goes_on_where_it_was_in_another_slot_and_back():
    device = device_with((Script(6, hashes(1, 2, 3)), 4), (Script(99), 3))
    assert run(device, (0, 0, 0, 4, True)).block_hashes == {}
    for start in (4, 5, 6):
        run(device, (0, 0, start, 1, True))
    assert run(device, (0, 0, 7, 1, True)).block_hashes == {0: hashes(1)}
    # Its five generated tokens are prompt now; another sequence has taken slot 0.
    assert run(device, (0, 1, 0, 3, True), (20, 0, 0, 8, False)).block_hashes == {}, "it is not reported again"
    device.forget(1)
    assert run(device, (0, 0, 0, 11, True)).block_hashes == {}
    assert run(device, (0, 0, 11, 1, True)).block_hashes == {0: hashes(2)}, "wherever it is computed"


def test_many_steps_at_once_fill_the_same_blocks():
    device = device_with((Script(12, hashes(1, 2)), 6), (Script(5), 2))
    run(device, (3, 0, 0, 6, True), (40, 1, 0, 2, True))
    slots, computed = np.array([3, 40]), np.array([6, 2], np.int32)
    assert device.decode_steps_ns(computed, 3).tolist() == [102, 102, 102]
    assert device.filled_blocks(slots, computed, 1) == {}
    assert device.filled_blocks(slots, computed, 3) == {3: hashes(1)}
    assert device.filled_blocks(slots, computed + 3, 3) == {3: hashes(2)}
    assert device.filled_blocks(np.array([3, 99]), computed + 6, 30) == {}


def test_a_slot_holds_nothing_of_a_sequence_that_ended():
    device = device_with((Script(12, hashes(1)), 6), (Script(12, hashes(2)), 6))
    run(device, (3, 0, 0, 6, True))
    device.forget(0)
    assert device.filled_blocks(np.array([3]), np.array([6], np.int32), 5) == {}


def test_a_sequence_without_a_script_is_a_bug_of_the_driver():
    device = device_with((Script(1, hashes(1)), 3), (Script(1, hashes(1)), 3))
    with pytest.raises(InvariantError, match="no script for sequence 7"):
        device.launch(forward((0, 7, 0, 3, True)), 0)
    with pytest.raises(InvariantError, match="sequence 0 has a script already"):
        device.expect(0, Script(2), 3)
    device.forget(0)
    device.forget(0)
    with pytest.raises(InvariantError, match="no script for sequence 0"):
        device.launch(forward((0, 0, 0, 3, True)), 0)


def test_a_scripted_device_waits_for_its_driver_to_price_the_step():
    device = ScriptedDevice(BLOCK)
    device.expect(0, Script(1, hashes(1)), 3)
    device.launch(forward((0, 0, 0, 3, True)), 0)
    assert device.batch.num_tokens.tolist() == [3]
    assert device.ready_at_ns() is None
    assert device.poll(10**18) == []
    with pytest.raises(InvariantError, match="launched twice"):
        device.launch(forward((0, 0, 3, 1, True)), 0)
    device.finish_at(500)
    assert device.batch is None
    assert device.ready_at_ns() == 500
    assert device.poll(500)[0].slot.tolist() == [0]
    with pytest.raises(InvariantError, match="finish_at without"):
        device.finish_at(600)
