"""The page of families is what its script writes."""

import re
import warnings

import pytest
from transformers.utils import logging

import make_families
from longitude.check import check


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_a_line_of_the_page_is_what_check_says(family):
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lines = make_families.page({family: check(make_families.toy(family))}).splitlines()
    written = make_families.PAGE.read_text(encoding="utf-8").splitlines()
    got, want = (
        [re.sub(r"transformers [\d.]+", "transformers", line) for line in page if line.startswith(starts)]
        for starts in [(f"| `{family}`", f"* `{family}`")]
        for page in (lines, written)
    )
    assert got and got == want  # in whichever version of transformers
