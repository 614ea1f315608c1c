"""The examples of docs/extending.md are modules that work."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshwright.api.saved_models import load_model
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.datasets.opening import open_data
from meshwright.metrics.sinks import SafeSink
from meshwright.models.families import MODELS
from meshwright.models.generation import generate, greedy
from meshwright.models.table_check import check_modules
from meshwright.system.errors import ConfigError, StorageError
from meshwright.train.announce import announce_end
from meshwright.train.build_observers import _own_sink
from meshwright.train.facts import look_at_data
from meshwright.train.resolve_model import (
    check_own_model,
    check_own_parts,
    extend_by,
    extend_only_by,
    own_options,
    resolve_model,
    user_sinks,
)
from tests.campaigns.new_user import example
from tests.helpers.checkpoints import set_manifest
from tests.helpers.cli import export, generate_text
from tests.helpers.families import small
from tests.helpers.hf import load_hf, save_checkpoint, save_transformers, tensors_of
from tests.helpers.job import assert_equal
from tests.helpers.resolved import resolved
from tests.helpers.tiny import plain_model
from tests.unit import test_families


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Names that a test adds go with it."""
    yield
    extend_only_by("")


def words(folder: Path, code: str, *others: str) -> list[str]:
    path = folder / "mine.py"
    path.write_text(code, "utf-8")
    dump = ("--job.dump_folder", str(folder / "out"))
    tokenizer = ("--model.tokenizer_path", "bytes")
    return ["--experimental.custom_import", str(path), *dump, *tokenizer, *others]


def test_the_model_of_the_docs_has_its_published_size(tmp_path, caplog) -> None:
    family = example("exaone4")
    model = ("--model.name", "exaone4", "--model.flavor", "exaone4_32b", "--checkpoint.enable")
    config = load_config(words(tmp_path, family + example("model"), *model))
    plan = resolved(config, 8)
    assert round(plan.model_args.table.num_params / 1e9, 3) == 32.003
    caplog.set_level("INFO", "meshwright")
    announce_end(plan, 0, None, 1, 1.0)
    assert caplog.messages[-1].endswith(f" MODEL_FOLDER --custom-import {tmp_path}/mine.py")


def test_a_model_is_exported_and_generates_with_its_module_alone(tmp_path, capsys) -> None:
    module = tmp_path / "mine.py"
    module.write_text(example("exaone4") + example("model"), "utf-8")
    extend_by(str(module))
    args = small(MODELS["exaone4"], vocab_size=259)
    model = load_hf(save_transformers(tmp_path / "hf", args), args)
    checkpoint = save_checkpoint(tmp_path / "dump" / "checkpoint", model, args)
    set_manifest(checkpoint, config={"experimental": {"custom_import": str(module)}})
    del MODELS["exaone4"]

    out, prompt = tmp_path / "out", ("--prompt", "Once", "--max-new-tokens", "8")
    for command, options in ((export, (out,)), (generate_text, prompt)):
        with pytest.raises(ConfigError, match=re.escape(f"fix: --custom-import {module} ")):
            command([checkpoint, *options])
    with pytest.raises(ConfigError, match=re.escape(f"fix: custom_import = {module} ")):
        load_model(checkpoint)
    with pytest.raises(ConfigError, match="--custom-import = 'no.py': no such file"):
        export([checkpoint, out, "--custom-import", "no.py"])
    own = ("--custom-import", module)
    export([checkpoint, out, "--dtype", "float32", *own])
    assert_equal(tensors_of(out), tensors_of(tmp_path / "hf"))
    texts = []
    for source in (checkpoint, out):
        del MODELS["exaone4"]  # each command imports it
        capsys.readouterr()
        generate_text([source, *prompt, *own])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != "Once\n"


def test_a_dataset_and_a_tokenizer_that_two_processes_use(tmp_path) -> None:
    text = tmp_path / "poem.txt"
    text.write_text("\n\n".join(f"stanza {i} has a few words" for i in range(40)))
    data = ("--training.dataset", "stanzas", "--training.dataset_path", str(text))
    sizes = ("--training.seq_len", "32", "--training.token_cache_folder", str(tmp_path / "cache"))
    own = words(tmp_path, example("dataset") + example("tokenizer"), *data, *sizes)
    own[own.index("bytes")] = str(text)
    config = load_config([*own, "--model.tokenizer_type", "characters"])
    resolved(config, 1)
    (source,) = open_data("training", config, num_workers=2)
    assert source.cache.num_documents == 40
    characters = sorted({*text.read_text()})
    tokens = source.cache.tokens(0, 8).tolist()
    assert "".join(characters[token] for token in tokens) == "stanza 0"


def test_options_of_a_dataset_make_other_documents(tmp_path) -> None:
    text = tmp_path / "poem.txt"
    text.write_text("\n\n".join(f"stanza {i} has a few words" for i in range(20)))
    data = ("--training.dataset", "stanzas", "--training.dataset_path", str(text))
    sizes = ("--training.seq_len", "16", "--training.token_cache_folder", str(tmp_path / "cache"))
    code = changed_example("dataset_options", ("return [entry.source", "return [Path(entry.source"),
                           ("dataset_path]", "dataset_path)]"))  # fmt: skip
    own, found = words(tmp_path, code, *data, *sizes), dict[str, int]()
    for separator in ("", "has"):
        options = [f"--options.stanzas.separator={separator}"] if separator else []
        config = load_config([*own, *options])
        extend_by(config.experimental.custom_import)
        (source,) = open_data("training", config, num_workers=2)
        found[source.content] = source.cache.num_documents
    assert [*found.values()] == [20, 21]
    with pytest.raises(ConfigError, match="unknown key options.stanzas.seperator\n.*separator"):
        own_options(load_config([*own, "--options.stanzas.seperator=x"]))


OWN_DATASETS = """
from meshwright.datasets.rows import IndexedDocuments, Reader
from meshwright.datasets.sources import DatasetSpec

def get(index):
    return {3: None, 8: [{"role": "user"}], 9: b"bytes"}.get(index, "a text")

def fails(entry, streamed):
    raise RuntimeError("no such table")

def is_away(entry, streamed):
    raise ConnectionError("no connection")

def times_out(index):
    raise TimeoutError("no answer")

def opens(entry, streamed):
    return IndexedDocuments(40, get)

class Endless(IndexedDocuments):
    def read(self, shard, num_shards, state=None):
        return Reader(iter(["a text", None] * 9), lambda: 0)

none = lambda entry: []
DATASETS = {
    "bad": DatasetSpec(opens, none),
    "raises": DatasetSpec(lambda *_: IndexedDocuments(40, lambda n: 1 // (n - 7) and "text"), none),
    "holes": DatasetSpec(lambda *_: Endless(40, get), none),
    "fails": DatasetSpec(fails, none),
    "away": DatasetSpec(is_away, none),
    "late": DatasetSpec(lambda *_: IndexedDocuments(40, times_out), none),
    "list": DatasetSpec(lambda entry, streamed: ["a text"], none),
    "files": DatasetSpec(opens, lambda entry: "a.txt"),
    "more": DatasetSpec(opens, lambda entry: [entry.nothing]),
    "numbers": DatasetSpec(opens, lambda entry: ["a.txt", 3]),
    "later": DatasetSpec(opens, lambda entry: (entry.nothing for _ in "a")),
}
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bad", "^bad document 3: is null, which is neither text nor a list of"),
        ("raises", r"^raises document 7: ZeroDivisionError: .* by zero \(.*mine.py:27\)"),
        ("holes", "^a document is null, which is neither"),
        ("fails", r"cannot be opened: RuntimeError: no such table \(.*mine.py:9\)"),
        ("away", "cannot be read now: ConnectionError: no connection"),
        ("late", r"^late document 0 cannot be read now: TimeoutError: no answer \(.*mine.py:15\)"),
        ("list", "its function returns list, and no documents\n  fix: return IndexedDocuments"),
        ("files", "its function `files` returns 'a.txt', and no list of paths\n  fix: return"),
        ("more", r"its function `files` raises AttributeError: .*'nothing' \(.*mine.py:34\)\n"),
        ("later", r"its function `files` raises AttributeError: .*'nothing' \(.*mine.py:36\)\n"),
        ("numbers", r"its function `files` returns \['a.txt', 3\], of which not all are paths\n"),
    ],
)
def test_faults_of_a_dataset_of_the_user_are_named(name, says, tmp_path) -> None:
    own = words(tmp_path, OWN_DATASETS, "--training.dataset", name, "--training.seq_len", "16")
    own += ["--training.token_cache_folder", str(tmp_path / "cache")]
    config = load_config(own)
    extend_by(config.experimental.custom_import)
    kind = StorageError if name in ("away", "late") else ConfigError  # those may pass
    with pytest.raises(kind, match=says):
        open_data("training", config, num_workers=1)
    if name == "bad":
        config = load_config([*own, "--training.max_bad_records", "3"])
        (source,) = open_data("training", config, num_workers=1)
        assert source.cache.num_documents == 37


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fails", "cannot be opened: RuntimeError: no such table"),
        ("list", "its function returns list, and no documents"),
        ("gone", "no such file: .*/gone.db\n  fix: check the path"),
        ("null", "^null document 0: is null, which .*\n  fix: correct it, or set training.max_bad"),
    ],
)
def test_check_tries_a_dataset_of_the_user(name, says, tmp_path) -> None:
    own = f"""
DATASETS["null"] = DatasetSpec(lambda *_: IndexedDocuments(1, lambda n: None), none)
DATASETS["gone"] = DatasetSpec(opens, lambda entry: ["{tmp_path}/gone.db"])
"""
    config = load_config(words(tmp_path, OWN_DATASETS + own, "--training.dataset", name))
    (fault,) = look_at_data(config).faults
    assert re.search(says, str(fault)), fault
    skips = load_config([*words(tmp_path, OWN_DATASETS + own), "--training.dataset=null",
                         "--training.max_bad_records=1"])  # fmt: skip
    assert not look_at_data(skips).faults


def test_a_bad_record_of_validation_is_passed_over_as_its_error_says(tmp_path) -> None:
    (tmp_path / "a.json").write_text('{"text": 3}\n{"text": "words"}\n')
    null = 'DATASETS["null"] = DatasetSpec(lambda *_: IndexedDocuments(1, lambda n: None), none)'
    own = words(tmp_path, OWN_DATASETS + null, "--validation.enable=true")
    for source in ("null", f"json --validation.dataset_path={tmp_path}/a.json"):
        given = [*own, *f"--validation.dataset={source}".split()]
        (fault,) = look_at_data(load_config(given)).faults
        assert "set training.max_bad_records" in str(fault)
        allows = load_config([*given, "--training.max_bad_records=1"])
        assert not look_at_data(allows).faults


def test_the_sink_of_the_docs_writes_its_file(tmp_path) -> None:
    config = load_config(words(tmp_path, example("sink")))
    ((name, build),) = user_sinks(config).items()
    sink = SafeSink(name, lambda: build(config, tmp_path))
    sink.write({"step": 1, "loss/train": 2.5})
    sink.write({"step": 2, "loss/train": 2.25})
    sink.close()
    assert (tmp_path / "losses.csv").read_text().split() == ["1,2.5", "2,2.25"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('open(path, "a"', "open(path, 3", r"raises TypeError: .* \(.*mine.py:9\)\n  fix: correct"),
        ("def close", "def closes", "makes <meshwright_user_.*, and no sink\n"),
        (
            'SINKS = {"losses.csv": LossTable',
            'SINKS = {"losses.csv": print',
            "makes None, and",
        ),
        ("path = folder", "raise OSError(28, 'full'); path = folder", ""),
    ],
)
def test_a_sink_that_cannot_be_made_is_named(old, new, says, tmp_path) -> None:
    config = load_config(words(tmp_path, changed_example("sink", (old, new))))
    (tmp_path / "out").mkdir()
    ((name, build),) = user_sinks(config).items()
    sink = partial(SafeSink, name, partial(_own_sink, name, build, config))
    if not says:  # a disk has room again
        sink().write({"step": 1, "loss/train": 2.5})
        return
    with pytest.raises(ConfigError, match=f"SINKS has 'losses.csv', which {says}"):
        sink()


class Tracker:
    """Stands in for the modules mlflow and trackio, and keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = []
        self.info = SimpleNamespace(run_id="a1")

    def __getattr__(self, name: str) -> object:
        def call(*given: object, **options: object) -> "Tracker":
            self.calls.append((name, given, options))
            return self

        return call


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_the_trackers_of_the_docs_continue_their_run(name, tmp_path, monkeypatch) -> None:
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, name, tracker)
    config = load_config(words(tmp_path, example("trackers")))
    for step in (1, 2):  # of a job, and of its resume
        sink = user_sinks(config)[name](config, tmp_path)
        sink.write({"step": step, "loss/train": 2.5})
        sink.close()
    metrics = {"loss/train": 2.5}
    if name == "trackio":
        begin = ("init", ("meshwright", tmp_path.name))
        options = {"config": config.model_dump(mode="json"), "resume": "allow", "embed": False}
        one = [(*begin, options), ("log", (metrics,), {"step": 1}), ("finish", (), {})]
        other = [one[0], ("log", (metrics,), {"step": 2}), one[2]]
        assert tracker.calls == [*one, *other]
    else:
        parameters = next(given[0] for called, given, _ in tracker.calls if called == "log_params")
        assert parameters["training.seq_len"] == config.training.seq_len
        starts = [given for called, given, _ in tracker.calls if called == "start_run"]
        assert starts == [(None,), ("a1",)]
        logged = [(given, to) for called, given, to in tracker.calls if called == "log_metrics"]
        assert logged == [((metrics,), {"step": 1}), ((metrics,), {"step": 2})]
        called = [called for called, _, _ in tracker.calls]
        assert called[:4] == ["start_run", "log_params", "log_metrics", "end_run"]
        assert called[4:] == ["start_run", "log_metrics", "end_run"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("\n1 / 0", r"cannot be imported: ZeroDivisionError: .*mine.py:2\)\n  fix: correct it"),
        ("raise SystemExit(0)", "cannot be imported: SystemExit: 0"),
        ("MODELS = {'llama': 3}", "MODELS must be a dict from names to Family"),
        ("SINKS = {'a': 3}", "SINKS must be a dict from names to functions, and has 'a': 3"),
        ("from meshwright.models.families.qwen3 import FAMILY\nMODELS = {'llama': FAMILY}",
         "MODELS has 'llama', which is there already"),
    ],
)  # fmt: skip
def test_a_module_that_is_wrong_is_named(code: str, message: str, tmp_path) -> None:
    (tmp_path / "mine.py").write_text(code)
    for key in ("experimental.custom_import", "--custom-import"):
        with pytest.raises(ConfigError, match=message) as error:
            extend_by(str(tmp_path / "mine.py"), key)
        assert error.value.key == key


def test_a_module_that_lies_beside_is_not_found_without_advice(tmp_path) -> None:
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "mine.py").write_text("import helper")
    advice = (
        f"No module named 'helper' .*\n  fix: put it into .*mine.py, or set PYTHONPATH={tmp_path}$"
    )
    with pytest.raises(ConfigError, match=advice):
        extend_by(str(tmp_path / "mine.py"))


def test_a_module_is_found_by_its_name_too(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_sinks.py").write_text("SINKS = {'a': print}")
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(["--experimental.custom_import", "my_sinks"])
    assert user_sinks(config) == {"a": print}


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}], ids=["untied", "tied"])
def test_the_example_passes_the_tests_of_families(tmp_path, monkeypatch, changes) -> None:
    code = example("exaone4")
    assert len(code.splitlines()) < 250
    assert not re.search(r"parallelisms|^import torch", code, re.MULTILINE)
    (tmp_path / "mine.py").write_text(code + example("model"), "utf-8")
    extend_by(str(tmp_path / "mine.py"))
    args = small(MODELS["exaone4"], vocab_size=131, **changes)
    test_families.test_the_table_is_that_of_the_model(args, monkeypatch)
    test_families.test_logits_loss_and_gradients_equal_transformers(args, 32)
    test_families.test_packed_documents_equal_transformers(args)


def own_model(folder: Path, old: str = "", new: str = "") -> JobConfig:
    """A job with the model of the docs that has parts of its own, after an edit."""
    code = example("sigmoid")
    assert code.count(old) >= 1
    return load_config(words(folder, code.replace(old, new, 1), "--model.name", "sigmoid"))


def test_own_parts_generate_the_tokens_of_whole_sequences(tmp_path) -> None:
    family, args = resolve_model(own_model(tmp_path))
    check_modules(args)
    check_modules(replace(args, mtp_depth=1))
    model, prompt = plain_model(small(family, vocab_size=131)), [3, 7, 11, 2]
    chosen = list(prompt)
    for _ in range(4):
        chosen.append(int(model(torch.tensor([chosen]))[0, -1].argmax()))
    assert [*generate(model, prompt, max_new_tokens=4, choose=greedy)] == chosen[4:]
    assert family.hf.why_not(args) == (
        "sigmoid has no name for layers.0.attention.mix.weight: add one to its `modules`"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("self.bias = ", "self.shift = ", "the table declares layers.0.attention_norm.bias, which"),
        ("own = super().parameters", "own = super().parameters; return own",
         "the table declares layers.0.feed_forward.w3.weight, which no module holds"),
        ("self.w1 = ", "self.w3 = Linear(2, 2); self.w1 = ",
         "a module holds layers.0.feed_forward.w3.weight, which the table doesn't declare"),
        ("torch.empty(spec.dim)", "torch.empty(2)",
         r"attention_norm.weight has the shape \(256,\) in the table and \(2,\) in its module"),
        ("Cut(dim=0)", "'heads_too'", "layout 'heads_too', which is none of embedding, "),
        ("Cut(dim=0)", "'colwise'", "'colwise', which is of torch.nn.Linear, and its module is a"),
        ("Cut(dim=0)", "Cut(dim=3)", r"of shape \(8, 32, 32\) can't be sharded along dimension 3"),
        (", parts=heads", "", "is sharded along a dimension of 8: give it `parts`"),
        ("mix.weight", "blend.weight", "the table declares layers.0.attention.blend.weight"),
        ("self.core = ", "self.kernel = ", "its attention has no module 'core', which the table"),
        ("spec.n_heads * spec", "spec.num_heads * spec",
         "'sigmoid': raises AttributeError: .*'num_heads' .*mine.py:48"),
        ("return self.decoder", "self.decoder", "its `expand` returns None, and no DecoderSpec"),
        ("(attention))] * self.n_layers", "(attention))]",
         r"attention_layers returns 1 specs, and n_layers = 6 \(.*mine.py"),
        ("return [Squared", "[Squared", "feed_forward_layers returns None specs, and n_layers"),
        ("norms=Layer", "norm='prae', norms=Layer",
         "layer 0: LayerSpec has norm = 'prae', which is none of 'pre', 'post', 'sandwich'"),
        ("**vars(attention)", "**{**vars(attention), 'biases': ('q',)}", "and no q.bias"),
        ("return super().parameters | {\"mix", "super().parameters | {\"mix", "attention are None"),
        ('("n_heads", self.n', '("heads", self.n', "and model.args has no 'heads'"),
        ("return self.wo", "self.wo", r"layers.0.attention makes None of \(1, 4, 256\)"),
        (".square())", ".square())[:, 1:]", r"feed_forward makes \(1, 3, 256\) of \(1, 4, 256\)"),
        ("q, k, v, mask, *, scale", "q, k, v", "TypeError: .*unexpected keyword.*mine.py:65"),
    ],
)  # fmt: skip
def test_a_table_that_its_modules_do_not_hold_is_rejected(old, new, message, tmp_path) -> None:
    config = own_model(tmp_path, old, new)
    family, args = resolve_model(config)
    with pytest.raises(ConfigError, match=message) as error:
        check_own_model(config, family, args)
    assert error.value.key == "model.name"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".square())", ".square() * float(x.mean() > 0))"),
        (".square())", ".square()[x > 0])"),
        (".square())", ".square() + x.numpy())"),
        ("class SquaredReLUSpec(FeedForwardSpec):",
         "class SquaredReLUSpec(FeedForwardSpec):\n    limit: 'OfATypeChecker' = 1"),
    ],
    ids=["item", "nonzero", "numpy", "hint"],
)  # fmt: skip
def test_what_cannot_be_tried_without_numbers_is_no_fault(old, new, tmp_path) -> None:
    config = own_model(tmp_path, old, new)
    check_own_model(config, *resolve_model(config))


def checked(folder: Path, code: str, *others: str) -> None:
    """Look at a module as `meshwright check` does."""
    config = load_config(words(folder, code, *others))
    extend_by(config.experimental.custom_import)
    check_own_parts(config, own_options(config))


SGD = """
import torch
from meshwright.train.optim.registry import ElementWise, MatrixWise

class Own(torch.optim.Optimizer):
    calls = 0

    def step(self, closure=None):
        goes_on = 1 - getattr(self, "found_inf", 0)
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.grad / (getattr(self, "grad_scale", None) or 1)
                UPDATE

OPTIMIZERS = {"own": ElementWise(lambda groups, config: Own(groups, {"lr": config.lr}))}
"""

RIGHT = "p.data -= goes_on * group['lr'] * gradient"


def changed_example(name: str, *changes: tuple[str, str]) -> str:
    code = example(name)
    for old, new in changes:
        assert old in code, old
        code = code.replace(old, new)
    return code


@pytest.mark.parametrize("name", ["loss", "metric", "optimizer", "lion", "adafactor"])
def test_the_parts_of_the_docs_keep_their_contract(name, tmp_path) -> None:
    checked(tmp_path, example(name))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (SGD.replace("UPDATE", RIGHT), ""),
        (SGD.replace("UPDATE", "pass"), "which changes no weight"),
        (SGD.replace("UPDATE", "p.data -= group['lr'] * p.grad"),
         "'own', which ignores `found_inf`"),
        (SGD.replace("UPDATE", RIGHT.replace("gradient", "p.grad")), "ignores `grad_scale`"),
        (SGD.replace("UPDATE", RIGHT.replace("gradient", "gradient.mean(0)")),
         "updates an element by others of its matrix, of which a rank has a part"),
        (SGD.replace("UPDATE", RIGHT + " / self.calls"), "goes on otherwise after a resume: keep"),
        (SGD.replace("UPDATE", "self.found_inf; " + RIGHT),
         r"can't resume: .*AttributeError: 'Own' .*'found_inf' \(.*mine.py:14\)"),
        (SGD.replace(", closure=None", "").replace("UPDATE", RIGHT), "can't resume: .*TypeError: "),
        (SGD.replace("UPDATE", RIGHT.replace("gradient", "gradient.mT")),
         "raises .*mine.py:14"),
        (SGD.replace("UPDATE", RIGHT + "; self.state[p]['owned_rows'] = p.new_zeros(len(p))"),
         "keeps 'owned_rows' of weight: of shape"),
        (SGD.replace("UPDATE", "p.lr"), "which raises AttributeError: .*mine.py:14"),
        ("LOSSES = {'mean': lambda states, logits, targets, options: logits.logsumexp(-1).mean()}",
         "LOSSES has 'mean', which gives .* for 5 tokens, instead of the loss of each"),
        ("LOSSES = {'by': lambda states, logits, targets, options: logits[:, 0] - logits.max()}",
         "'by', which gives a token another loss next to others, and chunks would change it"),
        ("LOSSES = {'no': lambda states, logits, targets, options: states[:, 0]}",
         "'no', which has no gradient by the logits"),
        ("LOSSES = {'own': lambda states, logits, targets, anything: logits.logsumexp(-1)}", ""),
        ("import torch\nLOSSES = {'weighted': lambda states, logits, targets, options: "
         "torch.nn.functional.cross_entropy(logits + states @ torch.ones(256, 1), targets, "
         "torch.ones(2048), reduction='none')}", ""),
        (example("adafactor").replace("return updates, {", "return {"),
         "OPTIMIZERS has 'adafactor', which returns no pair of the updates and the new state"),
        (example("adafactor").replace('{"row": (rows', '{"r": (), "row": (rows'),
         r"'adafactor', which returns state 'r' as None, and \(2,\) is declared"),
        (example("adafactor").replace("return 1.0", "pass"), "which has None as its factor for a"),
        (changed_example("metric", ("(2, dt", "(len(parts.shards), dt"), ("[1] ", "[0] ")),
         "METRICS has 'optim/zero_share', which measures sums of another shape or type on a rank"),
        (changed_example("metric", ("return counts", "return counts.float() if parts.batches else "
                                    "counts")), "of another shape or type on a rank"),
        (changed_example("adafactor", ('row = state["row"].lerp', 'row = state["row"].lerp_')),
         "'adafactor', which changes its state in place, where only what it returns counts"),
        (changed_example("optimizer", ("dim=(1, 2)", "dim=(0, 1, 2)")),
         "'largest', which updates a matrix by others of its stack"),
        (changed_example("adafactor", ("gradients, options, state, w", "gradients, options, w")),
         "'adafactor', which raises TypeError: direction"),
        (example("metric").replace("torch.int64", "torch.int32"), "measures torch.int32, and only"),
        (example("metric").replace("optim/zero_share", "loss/train"),
         "METRICS has 'loss/train', which starts as the built-in metrics do"),
    ],
)  # fmt: skip
def test_a_part_that_breaks_its_contract_is_named(code, message, tmp_path) -> None:
    if not message:
        checked(tmp_path, code)
        return
    with pytest.raises(ConfigError, match=message) as error:
        checked(tmp_path, code)
    assert error.value.key == "experimental.custom_import"


def test_a_loss_or_early_step_that_does_not_fit_is_rejected(tmp_path) -> None:
    with pytest.raises(ConfigError, match="training.loss = 'smoth': no such loss\n.*mean smooth"):
        resolved(load_config(words(tmp_path, example("loss"), "--training.loss", "smoth")), 1)
    early = ("--optimizer.early_step_in_backward", "--training.max_norm", "inf")
    with pytest.raises(ConfigError, match="leaves no gradients to the metrics of your module: opt"):
        resolved(load_config(words(tmp_path, example("metric"), *early)), 1)


def test_what_a_broken_module_may_have_is_no_second_error(tmp_path) -> None:
    """Its formats, tokenizers and optimizers are unknown; the mesh is wrong on its own."""
    names = ("training.dataset_format", "model.tokenizer_type", "optimizer.name")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    data = ["--training.dataset=json", f"--training.dataset_path={rows}"]
    mesh = "--parallelism.pipeline_parallel_degree=7"
    given = words(tmp_path, "import nothing_like_this", *data, *[f"--{n}=mine" for n in names])
    with pytest.raises(ConfigError, match="No module named 'nothing_like_this'") as caught:
        resolved(load_config([*given, mesh]), 2)
    assert "no such" not in str(caught.value)
    assert "pipeline_parallel_degree" in str(caught.value)
    (tmp_path / "mine.py").write_text("OPTIONS = {}")
    with pytest.raises(ConfigError) as caught:
        resolved(load_config(given), 2)
    assert str(caught.value).count("no such") >= 2


def test_a_check_opens_a_dataset_once_that_stages_share(tmp_path) -> None:
    note, toml = tmp_path / "opened", tmp_path / "a.toml"
    code = f"""
from meshwright.datasets.rows import IndexedDocuments
from meshwright.datasets.sources import DatasetSpec

def opens(entry, streamed):
    with open({str(note)!r}, "a") as file:
        file.write(f"{{entry.source.max_documents}}\\n")
    return IndexedDocuments(4000, lambda number: f"text {{number}}")

DATASETS = {{"mine": DatasetSpec(opens, lambda entry: [])}}
"""
    stages = """
training.steps = 20
training.dataset = "mine"
checkpoint.enable = true
[[training.stages]]
until_tokens = 10240
[[training.stages]]
seq_len = 256
"""
    toml.write_text(stages)
    given = [str(toml), "--training.global_batch_size=8", "--training.seq_len=128"]
    resolved(load_config([*given, *words(tmp_path, code)]), 1)
    assert note.read_text().split() == ["0"]
    note.unlink()
    other = (
        "--validation.enable=true",
        "--validation.dataset=mine",
        "--validation.max_documents=9",
    )
    resolved(load_config([*given, *words(tmp_path, code, *other)]), 1)
    assert note.read_text().split() == ["0", "9"]
