"""The order of a review, from evidence that is written by hand."""

import numpy as np

from finetune.data.data_set import DataSet
from finetune.data.samples import PathList, Samples
from finetune.data.targets import ClassIndex
from finetune.review.doubts import Evidence, Order, find_mistakes, order_images
from finetune.runs.predictions_table import Predictions

NAMES = ["cat", "dog", "owl"]


def data_of(labels: list[int], splits: list[int]) -> DataSet:
    """Images with these labels in train, 0, and test, 1, sorted by their splits."""
    assert splits == sorted(splits)
    parts = {
        name: [label for label, split in zip(labels, splits, strict=True) if split == k]
        for k, name in enumerate(("train", "test"))
    }
    samples = {
        name: Samples(
            PathList(f"/data/{name}/{i}.png" for i in range(len(of))),
            ClassIndex(np.array(of, np.int64), 3),
        )
        for name, of in parts.items()
    }
    return DataSet(NAMES, samples, has_splits=True)


def sure(labels: list[int]) -> np.ndarray:
    """Probabilities of 0.8 for each label."""
    found = np.full((len(labels), 3), 0.1)
    found[np.arange(len(labels)), labels] = 0.8
    return found


def test_the_least_probable_label_is_first_and_then_what_is_known_to_be_right():
    labels = [0, 0, 1, 1, 2]
    probabilities = sure(labels)
    probabilities[1] = [0.3, 0.6, 0.1]
    probabilities[3] = [0.9, 0.02, 0.08]
    order = order_images(data_of(labels, [0] * 5), Evidence(np.array(labels), probabilities))
    assert order.images.tolist() == [3, 1, 0, 2, 4] and len(order.reasons) == 2
    assert order.reasons[3] == "similar images suggest cat"


def test_copies_in_two_classes_are_first_and_copies_in_two_splits_after_doubtful_labels():
    labels, splits = [0, 1, 1, 2, 2, 0], [0, 0, 0, 0, 1, 1]
    probabilities = sure(labels)
    probabilities[2] = [0.9, 0.05, 0.05]
    evidence = Evidence(
        np.array(labels), probabilities, copies=[[0, 1], [3, 4]], errors={5: "damaged"}
    )
    order = order_images(data_of(labels, splits), evidence)
    assert order.images.tolist() == [0, 1, 2, 3, 4, 5] and len(order.reasons) == 6
    assert [order.reasons[i] for i in (0, 1, 3, 4, 5)] == [
        "the same image is also in dog",
        "the same image is also in cat",
        "the same image is also in the test split",
        "the same image is also in the train split",
        "cannot be decoded: damaged",
    ]


def test_a_run_s_mistakes_are_among_the_doubtful_ones():
    labels = [0, 0, 1, 1]
    probabilities = sure(labels)
    probabilities[1] = [0.2, 0.7, 0.1]
    evidence = Evidence(
        np.array(labels), probabilities, mistakes={2: ("cat", 0.01), 1: ("dog", 0.3)}
    )
    order = order_images(data_of(labels, [1] * 4), evidence)
    assert order.images.tolist() == [2, 1, 0, 3]
    assert order.reasons[1] == "similar images suggest dog; the run predicts dog"


def test_of_several_labels_the_least_probable_statement_counts():
    labels = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 1]])
    probabilities = np.where(labels == 1, 0.9, 0.1)
    probabilities[1] = [0.4, 0.9, np.nan]  # cat is doubtful, and nothing is known of owl
    probabilities[2] = [0.1, 0.7, 0.6]
    evidence = Evidence(labels, probabilities, copies=[[0, 3]])
    order = order_images(data_of([0] * 4, [0] * 4), evidence)
    assert order.images.tolist() == [0, 3, 2, 1] and len(order.reasons) == 4
    assert [order.reasons[i] for i in (0, 3, 2, 1)] == [
        "the same image is also in dog + owl",
        "the same image is also in cat",
        "similar images suggest dog, owl",
        "similar images suggest not cat",
    ]


def test_images_that_were_shown_keep_their_places_and_reasons():
    earlier = Order(np.array([4, 2, 0, 1, 3]), {4: "a", 2: "b", 0: "c"})
    later = Order(np.array([3, 2, 1, 0, 4]), {3: "d", 2: "e"})
    is_shown = np.array([False, False, True, False, True])
    order = later.after(earlier, is_shown)
    assert order.images.tolist() == [4, 2, 3, 1, 0]
    assert order.reasons == {4: "a", 2: "b", 3: "d"}


def test_mistakes_of_a_run_with_several_labels_are_those_with_other_labels():
    found = Predictions(
        names=NAMES,
        paths=["a", "b", "c"],
        is_single=False,
        labels=np.zeros((3, 3), bool),  # of the time of the run
        decided=np.array([[1, 1, 0], [0, 0, 0], [0, 0, 1]], bool),
        probabilities=np.array([[0.9, 0.8, 0.1], [0.1, 0.2, 0.4], [0.1, 0.2, 0.7]]),
        unread=[],
    )
    labels = np.array([[0, 0, 1], [1, 0, 0], [0, 0, 1]], np.uint8)
    mistakes = find_mistakes(found, [1, 0, 2], labels, NAMES)
    assert {i: (text, round(p, 6)) for i, (text, p) in mistakes.items()} == {
        1: ("cat + dog", 0.2),
        0: ("no label", 0.4),
    }


def test_mistakes_of_a_run_with_other_classes_are_those_that_the_review_knows():
    decided = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 0]], bool)
    p = np.where(decided, 0.8, 0.1)
    paths = ["a", "b", "c", "elsewhere"]
    found = Predictions(["cat", "dog", "elk"], paths, True, decided, decided, p, [])
    mistakes = find_mistakes(found, [0, 1, 2, None], np.array([1, 2, 0]), NAMES)
    # dog, which the run knows, and owl, which it does not; elk is no class of the review
    assert {i: (text, round(p, 6)) for i, (text, p) in mistakes.items()} == {
        0: ("cat", 0.1),
        1: ("dog", 0.2),
    }
