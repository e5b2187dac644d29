"""The next token: what is counted, what is learned, what is refused."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import small_config

import fedjax_flat as ff
from fedjax_flat.data import Batch, Dataset, Examples
from fedjax_flat.data.sources import text

VOCABULARY = text.Vocabulary.of("abcd")
TOKENS = len(VOCABULARY.tokens)  # pad, a, b, c, d, oov, bos, eos


class Bigrams(nn.Module):
    """Logits of the next token from this one alone."""

    tokens: int

    @nn.compact
    def __call__(self, x, *, train=False):
        del train
        return nn.Embed(self.tokens, self.tokens, name="classifier")(x)


def sentences(count, seed=0, length=6):
    """Each letter is followed by the next of the alphabet, nine times of ten; some lines short."""
    random = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        at = random.integers(4)
        line = [VOCABULARY.bos]
        for _ in range(random.integers(2, length + 4)):
            line.append(1 + at if random.random() > 0.1 else VOCABULARY.oov)
            at = (at + 1) % 4 if random.random() > 0.1 else random.integers(4)
        lines.append(np.array([*line, VOCABULARY.eos], np.int32))
    parts = [text.windows(line, length) for line in lines]
    return Examples(*(np.concatenate(x) for x in zip(*parts, strict=True)))


def dataset(classes=VOCABULARY.tokens):
    return Dataset("letters", sentences(40), sentences(25, seed=1), TOKENS, task="language",
                   classes=classes)


def task_of(data):
    model = ff.models.from_linen(Bigrams(TOKENS), data.inputs)
    return ff.tasks.language(model, ff.data.preprocess(data), data)


def test_language_against_numpy():
    data = dataset()
    task = task_of(data)
    variables = task.init(jax.random.key(0))
    table = np.asarray(variables.params["classifier"]["embedding"], float)
    inputs, labels = data.test
    sums = ff.evaluator(task, 7)(variables, data.test)
    means = {k: float(v) for k, v in task.means(sums).items()}
    losses, right, word_right = [], [], []
    for sentence, answer in zip(inputs, labels, strict=True):
        for token, label in zip(sentence, answer, strict=True):
            if label == 0:
                continue
            logits = table[token]
            losses.append(np.log(np.exp(logits).sum()) - logits[label])
            right.append(logits.argmax() == label)
            if VOCABULARY.tokens[label] not in ("<oov>", "<bos>", "<eos>"):
                word_right.append(right[-1])
    assert len(word_right) < len(right) < labels.size
    assert list(means) == ["loss", "perplexity", "accuracy", "word_accuracy"]
    assert float(sums["units"]) == len(right)
    assert float(sums["words"]) == len(word_right)
    assert float(sums["examples"]) == len(labels)
    assert means["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert means["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
    assert means["accuracy"] == pytest.approx(np.mean(right), rel=1e-6)
    assert means["word_accuracy"] == pytest.approx(np.mean(word_right), rel=1e-6)
    assert means["accuracy"] != pytest.approx(means["word_accuracy"], abs=1e-3)


def test_without_names_there_is_no_word_accuracy():
    data = dataset(classes=())
    task = task_of(data)
    means = task.means(ff.evaluator(task, 7)(task.init(jax.random.key(0)), data.test))
    assert list(means) == ["loss", "perplexity", "accuracy"]


def test_padding_never_trains():
    """Logits where the label is padding have no gradient, and the mean is over real tokens."""
    data = dataset()
    task = task_of(data)
    variables = task.init(jax.random.key(0))
    batch = Batch(*(jnp.asarray(x[:5]) for x in data.train), jnp.arange(5) < 4)

    def loss(logits):
        losses, mask = task.losses(ff.models.Outputs(logits), batch)
        return ff.tasks.masked_sum(losses, mask)

    logits = task.forward(variables, batch, None).logits
    gradient = np.asarray(jax.grad(loss)(logits))
    real = (data.train.labels[:5] != 0) & (np.arange(5) < 4)[:, None]
    assert 0 < real.sum() < real.size
    assert not gradient[~real].any()
    assert (np.abs(gradient[real]).max(-1) > 0).all()


def test_learns_across_clients():
    data = dataset()
    task = task_of(data)
    count = len(data.train.labels)
    federated = ff.data.federate(data.train, ff.testing.partition_of((10, count - 10)))
    client = ff.client.local_training(task, ff.client.sgd(2.0), batch_size=8, epochs=2)
    algorithm = ff.algorithms.fedavg(client, optax.sgd(1.0))
    step = jax.jit(ff.round_step(algorithm, ff.uniform(2, 2), ff.cohort_map("map"), task=task))
    state = ff.init_state(algorithm, task.init(jax.random.key(0)), 2, jax.random.key(1))
    for _ in range(15):
        state, info = step(state, federated)
    means = task.means(ff.evaluator(task, 6)(state.server.model, data.test))
    assert float(means["word_accuracy"]) > 0.5
    assert float(means["perplexity"]) < 5
    assert np.isfinite(info.report["accuracy"])


def test_a_whole_run(tmp_path):
    ff.register.source("letters", lambda: dataset())
    ff.register.model("bigrams", lambda num_classes: Bigrams(num_classes))
    try:
        config = small_config(data__name="letters", partition__name="iid", partition__clients=4,
                              cohort__size=2, model__name="bigrams", client__learning_rate=2.0)
        result = ff.train(config, tmp_path, progress=False)
    finally:
        ff.data.SOURCES.remove("letters")
        ff.models.MODELS.remove("bigrams")
    last = [r for r in result.records if r["split"] == "test"][-1]
    assert last["perplexity"] == pytest.approx(np.exp(last["loss"]), rel=1e-4)
    assert 0.2 < last["accuracy"] <= 1


@pytest.mark.parametrize(("split", "of", "value", "message"), [
    ("train", "inputs", 8, r"token 8 at place 2 of train example 3 is out of the voc.*0 to 7 \(1"),
    ("test", "inputs", -1, "token -1 at place 2 of test example 3"),
    ("train", "labels", 8, r"label 8 of train example \(3, 2\) is no class"),
])
def test_tokens_out_of_the_vocabulary(split, of, value, message):
    data = dataset()
    getattr(getattr(data, split), of)[3, 2] = value
    with pytest.raises(ff.UsageError, match=message):
        task_of(data)


def test_inputs_that_are_no_tokens():
    data = dataset()
    floats = dataclasses.replace(data, train=data.train._replace(
        inputs=data.train.inputs.astype(np.float32)))
    with pytest.raises(ff.UsageError, match=r"inputs are float32 of shape .* expected tokens"):
        task_of(floats)


def test_a_class_per_text_is_no_language():
    data = dataset()
    task = task_of(data)
    batch = Batch(jnp.asarray(data.train.inputs[:3]), jnp.zeros(3, jnp.int32), jnp.ones(3, bool))
    with pytest.raises(ff.UsageError, match=r"A class per text is task.name = 'classification'"):
        task.evaluate(task.init(jax.random.key(0)), batch)


def test_mixup_of_tokens():
    data = dataset()
    model = ff.models.from_linen(Bigrams(TOKENS), data.inputs)
    with pytest.raises(ff.UsageError, match="tokens cannot be mixed"):
        ff.tasks.language(model, ff.data.preprocess(data, mixup=0.2), data)
