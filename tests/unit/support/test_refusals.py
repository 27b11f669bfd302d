import pytest

from genserve.errors import GenserveError, InvalidFieldError
from tests.support.refusals import refuses


def test_the_class_and_the_field_are_held() -> None:
    with refuses(InvalidFieldError, field="prompts[1]", says="empty"):
        raise InvalidFieldError.of("prompts[1]", "must not be empty")


@pytest.mark.parametrize("wrong", [{"field": "prompts"}, {"says": "missing"}])
def test_another_field_or_other_words_fail(wrong: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="prompts"), refuses(InvalidFieldError, **wrong):
        raise InvalidFieldError.of("prompts[1]", "must not be empty")


def test_a_class_derived_from_the_one_that_is_meant_fails() -> None:
    with pytest.raises(AssertionError, match="InvalidFieldError was raised"), refuses(GenserveError):
        raise InvalidFieldError.of("prompts", "must not be empty")
