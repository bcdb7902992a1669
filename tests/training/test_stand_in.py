"""The linear classifier that stands in for the network learns answers from words and from parts of words."""

from pathlib import Path

from training.stand_in import DECLINED, NUM_FEATURES, Asked, Classifier, drawn_questions, features, read_questions

QUESTIONS = [
    Asked(f"{start} {text}", label)
    for start in ("how do i", "please", "hi, i want to")
    for text, label in (("change the port", "port"), ("stop the server", "stop"), ("bake a cake", DECLINED))
]


def test_a_misspelt_word_shares_parts_with_the_right_one() -> None:
    shared = set(features("benchmark")) & set(features("benchmrak"))
    assert len(shared) >= 5
    assert all(0 <= index < NUM_FEATURES for index in features("which port?"))
    assert features("") and features("port") == features("Port")


def test_it_learns_and_answers_other_wordings() -> None:
    classifier = Classifier(["port", "stop", DECLINED])
    classifier.fit(QUESTIONS, passes=40)
    answers = classifier.answer(["could you change ports?", "stopping the server", "cakes"])
    assert [label for label, _ in answers] == ["port", "stop", DECLINED]
    assert all(1 / 3 < likely <= 1 for _, likely in answers)


def test_questions_are_drawn_with_labels_and_read_from_a_file(tmp_path: Path) -> None:
    drawn = drawn_questions(200, seed=1)
    assert drawn == drawn_questions(200, seed=1)
    assert 20 <= sum(question.label == DECLINED for question in drawn) <= 140
    file = tmp_path / "asked.txt"
    file.write_text("license: may i sell it?\n\ndeclined: what is 2:1?\n", encoding="utf-8")
    assert read_questions(file) == [Asked("may i sell it?", "license"), Asked("what is 2:1?", "declined")]
