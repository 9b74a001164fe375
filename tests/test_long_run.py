"""Many steps: nothing grows, nothing compiles again. Thousands: ``tests.long_run``."""

import dataclasses

from tests import long_run


def test_nothing_grows_and_nothing_is_compiled_again():
    report = long_run.run(60)
    assert report.troubles() == []
    assert (report.steps, report.programs, report.compilations) == (60, 1, 0)


def test_growth_is_seen():
    good = long_run.Report(2000, 1, 0, (), (5, 5), (100, 104), (1.0, 9.0), (4.0, 1.0))
    assert good.troubles() == []
    for change in (
        {"programs": 2},
        {"compilations": 1},
        {"changed": ("['w']",)},
        {"live": (5, 6)},
        {"rss_bytes": (100, 106)},
        {"losses": (4.0, 3.9)},
        {"losses": (4.0, float("nan"))},
    ):
        assert len(dataclasses.replace(good, **change).troubles()) == 1
