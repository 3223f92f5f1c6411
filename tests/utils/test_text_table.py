"""Tables align their columns under the names in the first row."""

from verl.utils.text_table import aligned


def test_numbers_end_flush_and_lines_have_no_blanks_at_the_end():
    rows = [("role", "GiB", "note"), ("actor", "7.5", ""), ("critic", "12.0", "worst")]
    assert aligned(rows, right=("GiB",)) == [
        "role     GiB  note",
        "actor    7.5",
        "critic  12.0  worst",
    ]
