from workload.test_report import one, record

from moestro.loadgen.drawing import run_figure, search_figure
from moestro.workload.run_records import Slos, make_report


def test_a_run_is_drawn_with_its_objectives(tmp_path):
    slos = Slos(ttft_ms=50)
    records = record([one(), one(late=9)])
    figure = run_figure(records, make_report(records, slos), slos)
    figure.savefig(tmp_path / "run.png")
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["TTFT", "TPOT", "ITL", "E2E"]
    assert "INVALID" in figure.get_suptitle()
    assert [len(axes.lines) for axes in figure.axes] == [3, 2, 2, 2]


def test_a_run_without_answers_is_drawn_as_such(tmp_path):
    records = record([one(failure="timeout")])
    figure = run_figure(records, make_report(records), None)
    figure.savefig(tmp_path / "run.svg")
    assert all(axes.texts[0].get_text() == "no values" for axes in figure.axes)


def test_a_search_is_drawn_in_order_of_rates(tmp_path):
    slos = Slos(ttft_ms=50)
    reports = [make_report(record([one()]), slos), make_report(record([one(failure="timeout")]), slos)]
    figure = search_figure([4.0, 2.0], reports, 0.9)
    figure.savefig(tmp_path / "search.pdf")
    assert figure.axes[0].lines[0].get_xdata().tolist() == [2, 4]
    assert list(figure.axes[0].lines[0].get_ydata()) == [0, 1]
