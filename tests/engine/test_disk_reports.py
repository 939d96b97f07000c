from cluster.engine.rank_channels import DiskReports
from pagedray.batch import DiskReport


def test_a_report_is_joined_once_every_rank_has_sent_its_own() -> None:
    reports = DiskReports(2)
    reports.add_report(0, DiskReport(3, True, [7], 0.5))
    reports.add_report(0, DiskReport(4, True, [], 0.5))
    reports.add_report(1, DiskReport(2, False))
    assert reports.take_joined() == []
    reports.add_report(1, DiskReport(3, True, [5, 7], 0.75))
    assert reports.take_joined() == [DiskReport(3, True, [5, 7], 0.75)]
    reports.add_report(1, DiskReport(4, True))
    reports.add_report(0, DiskReport(2, False))
    assert reports.take_joined() == [DiskReport(4, True, [], 0.5), DiskReport(2, False)]


def test_no_rank_reports_nothing() -> None:
    assert DiskReports(0).take_joined() == []
