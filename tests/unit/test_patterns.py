"""Names of layers against patterns."""

from backend.models.patterns import first_match


def test_the_first_pattern_that_matches_counts():
    values = {"audio_*": "audio", "*_norm": "norm", "*": "any"}
    names = ("audio_norm", "q_norm", "proj")
    assert [first_match(name, values, None) for name in names] == ["audio", "norm", "any"]
    assert first_match("proj", {"audio_*": "audio"}, "") == ""
