"""Several real processes: one result, one plan, and no hang when one of them dies."""

import numpy as np
import pytest

from tests import worker
from tests.processes import run_processes
from tests.references import relative


def load(path):
    with np.load(path) as found:
        return dict(found)


def assert_close(a, b, limit):
    assert a.keys() == b.keys()
    for name in a:
        assert relative(a[name], b[name]) <= limit, name


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Four steps in one process."""
    folder = tmp_path_factory.mktemp("one")
    result = folder / "result.npz"
    arguments = dict(store=str(folder / "store"), result=str(result), stop=4)
    (outcome,) = run_processes(1, "train", folder, **arguments)
    assert outcome.code == 0, outcome.text
    return load(result)


def test_train_kill_resume_with_other_process_counts(uninterrupted, tmp_path):
    """Killed while a step runs.

    Fault: one of several processes is killed while a step runs
    Happens: the others end with an error within a minute; none hangs
    Kept: the last checkpoint; 4, 2 or 1 processes go on from it as if nothing had been
    """
    result = tmp_path / "result.npz"
    arguments = dict(store=str(tmp_path / "store"), result=str(result))
    # The last of two processes dies in step 2, when step 1 is saved.
    killed = run_processes(
        2, "train", tmp_path / "2", stop=4, die_in_step=2, **arguments
    )
    assert killed[1].code == -9, killed[1].text
    assert killed[0].code != 0
    assert not result.exists()
    # Four processes go on for two steps, then one process alone.
    for count, stop, start in ((4, 3, 1), (1, 4, 3)):
        outcomes = run_processes(
            count, "train", tmp_path / str(count), stop=stop, **arguments
        )
        assert [o.code for o in outcomes] == [0] * count, outcomes[-1].text
        reports = [o.json() for o in outcomes]
        assert all(report == reports[0] for report in reports)
        assert reports[0]["start"] == start
    assert_close(load(result), uninterrupted, 1e-5)


def test_a_kill_during_a_save_keeps_the_checkpoint_before(uninterrupted, tmp_path):
    """Killed while a checkpoint is written.

    Fault: the process is killed while it writes a checkpoint
    Happens: the next run starts from the checkpoint before
    Kept: that checkpoint, bit for bit
    """
    result = tmp_path / "result.npz"
    arguments = dict(store=str(tmp_path / "store"), result=str(result), stop=4)
    (killed,) = run_processes(1, "train", tmp_path, die_in_save=3, **arguments)
    assert killed.code == -9
    (outcome,) = run_processes(1, "train", tmp_path, **arguments)
    assert outcome.code == 0, outcome.text
    assert outcome.json()["start"] == 2
    assert_close(load(result), uninterrupted, 0.0)


def test_processes_that_plan_otherwise_are_told_so(tmp_path):
    """Before the first exchange, on every process.

    Fault: a process has other versions, parameters, costs, options or another plan
    Happens: `init` raises on every process, and names what differs and where
    Kept: nothing has run yet
    """
    outcomes = run_processes(2, "disagree", tmp_path)
    for outcome in outcomes:
        assert outcome.code == 1, outcome.text
        told = outcome.json()
        assert list(told) == list(worker.ODD)
        for kind, name in worker.ODD.items():
            want = f"got other {name} on process 1 than on process 0"
            assert want in told[kind], kind
        assert outcome.text.count("all processes must plan alike") == 6
