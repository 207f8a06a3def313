"""A device that holds scripts finds them by serial: a slot is used again, a serial never."""

from support import fake_device

from moestro.core.work import StepResult
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings


def test_units_carry_the_number_that_add_gave():
    settings = SchedulerSettings(num_blocks=8, block_size=4, max_model_len=16, max_num_seqs=1, max_num_batched_tokens=9)
    scheduler = Scheduler(settings)
    serials = [scheduler.add(fake_device.make_request(name, range(3), max_tokens=4)) for name in "ab"]
    first = scheduler.schedule(0).units
    scheduler.abort("a", 0)
    scheduler.update(StepResult(first.slot), 0)
    second = scheduler.schedule(0).units
    assert first.serial.tolist() == serials[:1]
    assert second.serial.tolist() == serials[1:]
    assert second.slot.tolist() == first.slot.tolist()
