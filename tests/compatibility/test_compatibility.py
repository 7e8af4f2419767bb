"""A training confirms every row of `docs/compatibility.md`, and the page has every row."""

from collections import Counter

import pytest
import torch

from tests.compatibility.case import Case
from tests.compatibility.tables import PAGE, TABLES, check, render

CASES = [
    pytest.param(case, id=f"{title}: {case.name}", marks=() if case.quick else pytest.mark.thorough)
    for title, cases in TABLES.items()
    for case in cases
]


@pytest.mark.drawn(24)
@pytest.mark.parametrize("case", CASES)
def test_a_case_has_the_result_in_its_table(case: Case) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # quicker for tensors as small as these
    try:
        check(case)
    finally:
        torch.set_num_threads(threads)


def test_the_page_is_that_of_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run `python -m tests.compatibility.write`"


@pytest.mark.parametrize("title", list(TABLES))
def test_rows_have_names_of_their_own_and_a_representative(title: str) -> None:
    names = Counter(case.name for case in TABLES[title])
    assert names.most_common(1)[0][1] == 1
    assert any(case.quick for case in TABLES[title])
