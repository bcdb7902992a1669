"""The files of sentence-transformers say how a model makes embeddings; unsupported files are refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save, save_file

from pagewick.errors import ModelLoadError
from pagewick.weights.dense_tensors import checkpoint_tensors
from pagewick.weights.description import describe, directory_config, read_configs
from pagewick.weights.module_files import ModuleFiles, missing_module_files, named_files
from pagewick.weights.opening import open_source
from pagewick.weights.sentence_transformers import with_modules
from tests.weights.modules import (
    MEAN,
    NEW_MEAN,
    NEW_TYPES,
    OLD_TYPES,
    dense,
    dense_weights,
    modules,
    with_two_layers,
    write_files,
)

PLAIN = ["Transformer", "Pooling", "Normalize"]
WITH_DENSE = ["Transformer", "Pooling", "Dense", "Normalize"]
LAYERS = [
    {"name": "2_Dense", "in_features": 384, "out_features": 24, "bias": False, "activation": "identity"},
    {"name": "3_Dense", "in_features": 24, "out_features": 8, "bias": True, "activation": "tanh"},
]


def added(directory: Path, config: dict[str, Any] | None = None, /, **contents: Any) -> dict[str, Any]:
    """Return the entries that files add to a config.json. A keyword is a path with __ for the slash."""
    names = {f"{name.replace('__', '/')}.json": content for name, content in contents.items()}
    write_files(directory, names)
    config = {"hidden_size": 384} if config is None else config
    found = with_modules(config, ModuleFiles.of_directory(directory))
    assert {key: found[key] for key in config} == config
    return {key: value for key, value in found.items() if key not in config}


def refused(directory: Path, **contents: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        added(directory, **contents)
    message = str(caught.value)
    assert 2 <= len(message.splitlines()) <= 6 and str(directory) in message
    return message


class TestModules:
    @pytest.mark.parametrize("types", [OLD_TYPES, NEW_TYPES])
    @pytest.mark.parametrize("kinds", [PLAIN, ["Transformer", "Pooling"], ["Transformer", "Pooling", "Dropout"]])
    def test_a_plain_model(self, kinds: list[str], types: dict[str, str], tmp_path: Path) -> None:
        found = added(tmp_path, modules=modules(kinds, types), **{"1_Pooling__config": MEAN})
        assert found == {"embedding_pooling": "mean"}

    def test_layers(self, tmp_path: Path) -> None:
        write_files(tmp_path, with_two_layers())
        assert added(tmp_path) == {"embedding_pooling": "mean", "embedding_dense": LAYERS}

    def test_nothing_is_added_without_a_list(self, tmp_path: Path) -> None:
        assert added(tmp_path, **{"1_Pooling__config": {"pooling_mode_max_tokens": True}}) == {}

    @pytest.mark.parametrize(
        "kinds",
        [["Transformer"], ["Transformer", "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"]],
    )
    def test_nothing_is_added_for_a_reranker(self, kinds: list[str], tmp_path: Path) -> None:
        assert added(tmp_path, modules=modules(kinds)) == {}

    def test_what_config_json_says_takes_precedence(self, tmp_path: Path) -> None:
        write_files(tmp_path, with_two_layers())
        assert added(tmp_path, {"embedding_pooling": "last"}) == {"embedding_dense": LAYERS}
        assert added(tmp_path, {"embedding_dense": []}) == {"embedding_pooling": "mean"}
        write_files(tmp_path, {"modules.json": b"damaged"})
        assert added(tmp_path, {"embedding_pooling": "last", "embedding_dense": LAYERS[:1]}) == {}

    def test_a_pooling_that_is_replaced_may_be_any(self, tmp_path: Path) -> None:
        contents = {"modules": modules(PLAIN), "1_Pooling__config": {"pooling_mode": "max"}}
        assert added(tmp_path, {"embedding_pooling": "mean"}, **contents) == {}
        assert 'say in its config.json how embeddings are made:\n  "embedding_pooling"' in refused(tmp_path)
        with pytest.raises(ModelLoadError, match='embedding_pooling is "max"; it must be one of mean, cls, last'):
            added(tmp_path, {"embedding_pooling": "max"})

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            (b"[{", "modules.json is not valid JSON"),
            ({"modules": []}, "modules.json does not hold a list of objects"),
            (["Transformer"], "modules.json does not hold a list of objects"),
            ([], "modules.json lists no modules"),
            ([{"path": ""}], "modules.json: module 0: type is missing; it must be a string"),
            ([{"type": 7, "path": ""}], "module 0: type is 7; it must be a string"),
            ([{"type": OLD_TYPES["Transformer"]}], "module 0: path is missing; it must be a string"),
            (
                [{"type": OLD_TYPES["Transformer"], "path": "0_Transformer"}],
                'path is "0_Transformer"; it must be empty',
            ),
            (modules(["Transformer", "sentence_transformers.models.LSTM", "Pooling"]), "module 1: type .*LSTM"),
            (modules(["Transformer", "sentence_transformers.models.CNN", "Pooling"]), "module 1: type .*CNN"),
            (modules(["Transformer", "sentence_transformers.models.WordWeights"]), "module 1: type .*WordWeights"),
            (modules(["custom_st.Transformer", "Pooling"]), r'module 0: type "custom_st\.Transformer".*no code'),
            (modules(["Transformer", "elsewhere.models.Pooling"]), r'module 1: type "elsewhere\.models\.Pooling"'),
            (
                modules(["Transformer", "Pooling", "Normalize", "Dense"]),
                "lists Transformer, Pooling, Normalize, Dense,",
            ),
            (modules(["Transformer", "Dense", "Normalize"]), "lists Transformer, Dense, Normalize, which is not"),
            (modules(["Transformer", "Normalize"]), "lists Transformer, Normalize, which is not"),
            (modules(["Transformer", "Pooling", "Pooling"]), "lists Transformer, Pooling, Pooling, which is not"),
            (modules(["Pooling", "Normalize"]), "lists Pooling, Normalize, which is not"),
        ],
    )
    def test_malformed_lists_and_other_modules(self, content: Any, complaint: str, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=complaint):
            added(tmp_path, modules=content)
        assert "modules.json" in refused(tmp_path)

    @pytest.mark.parametrize("path", ["../elsewhere", "/etc", "a/b", "..", ".", "", "a\\b", "a\0b"])
    def test_a_path_that_leads_elsewhere(self, path: str, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        write_files(tmp_path, {"elsewhere/config.json": MEAN})
        listed = modules(PLAIN)
        listed[1]["path"] = path
        message = refused(tmp_path / "model", modules=listed)
        assert "modules.json: module 1: path" in message and "a folder in the model's directory" in message
        assert named_files(tmp_path / "model") == ([], [])

    def test_two_modules_in_one_folder(self, tmp_path: Path) -> None:
        write_files(tmp_path, with_two_layers())
        listed = modules(["Transformer", "Pooling", "Dense", "Dense"])
        listed[3]["path"] = listed[2]["path"]
        assert "modules.json names the folder 2_Dense for two modules" in refused(tmp_path, modules=listed)


class TestPooling:
    @pytest.mark.parametrize(
        ("content", "pooling"),
        [
            (MEAN, "mean"),
            (NEW_MEAN, "mean"),
            ({"word_embedding_dimension": 8}, "mean"),
            ({**MEAN, "pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls"),
            ({**MEAN, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
            ({"pooling_mode": "cls"}, "cls"),
            ({"pooling_mode": ["lasttoken"], "pooling_mode_mean_tokens": True}, "last"),
            ({"pooling_mode": None, "pooling_mode_lasttoken": True, "include_prompt": False}, "last"),
        ],
    )
    def test_each_form(self, content: dict[str, Any], pooling: str, tmp_path: Path) -> None:
        found = added(tmp_path, modules=modules(PLAIN), **{"1_Pooling__config": content})
        assert found == {"embedding_pooling": pooling}

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            (b"{", "is not valid JSON"),
            ([MEAN], "does not hold a JSON object"),
            ({**MEAN, "pooling_mode_mean_tokens": 1}, "pooling_mode_mean_tokens is 1; it must be true or false"),
            ({**MEAN, "pooling_mode_mean_tokens": False}, "pooling_mode_mean_tokens is false; it must be true"),
            ({**MEAN, "pooling_mode_cls_token": True}, "pooling_mode_cls_token true is not supported: .*2 poolings"),
            ({"pooling_mode_max_tokens": True}, 'pooling_mode_max_tokens true is not supported: "max" is none of mean'),
            ({"pooling_mode_weightedmean_tokens": True}, '"weightedmean" is none of mean, cls, lasttoken'),
            ({"pooling_mode_of_the_future": True}, "pooling_mode_of_the_future true is not supported"),
            ({"pooling_mode": "mean_sqrt_len_tokens"}, 'pooling_mode "mean_sqrt_len_tokens" is not supported'),
            ({"pooling_mode": ["mean", "max"]}, "2 poolings at once: mean, max"),
            ({"pooling_mode": []}, r"pooling_mode is \[\]; it must be a name"),
            ({"pooling_mode": 3}, "pooling_mode is 3; it must be a name"),
            ({"pooling_mode": [True]}, r"pooling_mode is \[true\]; it must be a name"),
            ({**MEAN, "include_prompt": False}, "include_prompt false is not supported: the tokens of an instruction"),
            ({**MEAN, "include_prompt": "no"}, 'include_prompt is "no"; it must be true or false'),
            ({**MEAN, "word_embedding_dimension": "x" * 500}, "word_embedding_dimension is .*; it must be a whole"),
        ],
    )
    def test_others_are_refused(self, content: Any, complaint: str, tmp_path: Path) -> None:
        write_files(tmp_path, {"modules.json": modules(PLAIN)})
        message = refused(tmp_path, **{"1_Pooling__config": content})
        assert message.startswith(f"{tmp_path}/1_Pooling/config.json")
        with pytest.raises(ModelLoadError, match=complaint):
            added(tmp_path)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        message = refused(tmp_path, modules=modules(PLAIN))
        assert "is incomplete: modules.json asks for 1_Pooling/config.json" in message
        assert missing_module_files(tmp_path) == ["1_Pooling/config.json"]


class TestDense:
    def layer(self, directory: Path, content: Any) -> dict[str, Any]:
        write_files(directory, {"modules.json": modules(WITH_DENSE), "1_Pooling/config.json": MEAN})
        (found,) = added(directory, **{"2_Dense__config": content})["embedding_dense"]
        assert isinstance(found, dict)
        return found

    @pytest.mark.parametrize("name", ["Tanh", "Sigmoid", "ReLU", "GELU", "SiLU"])
    def test_activations(self, name: str, tmp_path: Path) -> None:
        content = dense(384, 24, activation_function=f"torch.nn.modules.activation.{name}")
        assert self.layer(tmp_path, content)["activation"] == name.lower()

    def test_the_librarys_defaults(self, tmp_path: Path) -> None:
        found = self.layer(tmp_path, {"in_features": 384, "out_features": 24})
        assert (found["bias"], found["activation"]) == (True, "tanh")

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            (b"\xff", "is not valid JSON"),
            (5, "does not hold a JSON object"),
            (dense(384, 0), "out_features is 0; it must be a whole number from 1"),
            (dense(384, 2**40), "out_features is 1099511627776; it must be"),
            ({"out_features": 3}, "in_features is missing; it must be a whole number"),
            (dense(384, 24, in_features=True), "in_features is true; it must be a whole number"),
            (dense(384, 24, in_features="384"), 'in_features is "384"; it must be a whole number'),
            (dense(384, 24, bias="yes"), 'bias is "yes"; it must be true or false'),
            (dense(384, 24, activation_function="os.system"), 'activation_function "os.system" is not supported'),
            (dense(384, 24, activation_function="torch.hub.load"), 'activation_function "torch.hub.load" is not'),
            (dense(384, 24, activation_function=["Tanh"]), r'activation_function is \["Tanh"\]; it must be a string'),
            (dense(384, 24, module_input_name="token_embeddings"), 'module_input_name "token_embeddings" is not supp'),
            (dense(384, 24, module_output_name="scores"), 'module_output_name "scores" is not supported'),
            (dense(384, 24, use_residual=True), "use_residual true is not supported"),
            (dense(383, 24), "in_features is 383, and the module before it gives 384 numbers"),
        ],
    )
    def test_others_are_refused(self, content: Any, complaint: str, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=complaint) as caught:
            self.layer(tmp_path, content)
        message = str(caught.value)
        assert message.startswith(f"{tmp_path}/2_Dense/config.json") and 2 <= len(message.splitlines()) <= 6

    def test_layers_that_do_not_fit(self, tmp_path: Path) -> None:
        write_files(tmp_path, {**with_two_layers(), "3_Dense/config.json": dense(25, 8)})
        assert "3_Dense/config.json: in_features is 25, and the module before it gives 24" in refused(tmp_path)

    def test_a_pickle(self, tmp_path: Path) -> None:
        write_files(tmp_path, {**with_two_layers(), "3_Dense/pytorch_model.bin": b""})
        assert "embedding_dense" in added(tmp_path)  # beside safetensors, it is not needed
        (tmp_path / "3_Dense/model.safetensors").unlink()
        message = refused(tmp_path)
        assert f"{tmp_path}/3_Dense holds no safetensors, only a pickle" in message and "runs code" in message


class TestTensors:
    def checkpoint(self, directory: Path, **changes: Any) -> Path:
        save_file({"w": torch.ones(3, 2)}, directory / "model.safetensors")
        contents = {"config.json": {"hidden_size": 384}, **with_two_layers(), **changes}
        return write_files(directory, {name: content for name, content in contents.items() if content is not None})

    def test_they_are_listed_under_their_folders_name(self, tmp_path: Path) -> None:
        files = with_two_layers()
        stored = {
            f"{folder}.{name}": tensor
            for folder in ("2_Dense", "3_Dense")
            for name, tensor in load(files[f"{folder}/model.safetensors"]).items()
        }
        with open_source(self.checkpoint(tmp_path)) as source:
            assert set(source.names()) == {"w", *stored} and len(stored) == 3
            assert source.config()["embedding_dense"] == LAYERS
            assert source.get("w").tolist() == torch.ones(3, 2).tolist()
            for name, tensor in stored.items():
                assert (source.shape(name), source.dtype(name)) == (tuple(tensor.shape), torch.float32)
                assert torch.equal(source.get(name), tensor)
        description = describe(tmp_path)
        assert {tensor.name: tensor.shape for tensor in description.tensors} == {
            "w": (3, 2), **{name: tuple(tensor.shape) for name, tensor in stored.items()},
        }  # fmt: skip
        assert description.config["embedding_dense"] == read_configs(tmp_path)[0]["embedding_dense"] == LAYERS

    def test_they_are_not_there_without_the_entry(self, tmp_path: Path) -> None:
        self.checkpoint(tmp_path, **{"config.json": {"embedding_dense": []}})
        with open_source(tmp_path) as source:
            assert source.names() == ("w",)
        self.checkpoint(tmp_path, **{"config.json": {}, "modules.json": modules(PLAIN)})
        assert [tensor.name for tensor in describe(tmp_path).tensors] == ["w"]

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            (b"damaged", "is truncated or damaged"),
            (dense_weights(24, 8, bias=False), r"holds linear.weight \[8, 24\].*must hold .*linear.bias \[8\]"),
            (dense_weights(8, 24), r"holds .*linear.weight \[24, 8\]"),
            (save({}), "holds nothing"),
            (save({"weight": torch.zeros(8, 24), "bias": torch.zeros(8)}), r"holds .*\bweight \[8, 24\]"),
            (
                save({"linear.weight": torch.zeros(8, 24, dtype=torch.int8), "linear.bias": torch.zeros(8)}),
                "linear.weight is stored as I8",
            ),
        ],
    )
    def test_other_tensors(self, content: bytes, complaint: str, tmp_path: Path) -> None:
        self.checkpoint(tmp_path, **{"3_Dense/model.safetensors": content})
        for read in (open_source, describe):
            with pytest.raises(ModelLoadError, match=complaint) as caught:
                read(tmp_path)  # type: ignore[operator]
            assert f"{tmp_path}/3_Dense/model.safetensors" in str(caught.value)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        self.checkpoint(tmp_path)
        (tmp_path / "3_Dense/model.safetensors").unlink()
        assert missing_module_files(tmp_path) == ["3_Dense/model.safetensors"]
        with pytest.raises(ModelLoadError, match=r"incomplete: modules\.json asks for 3_Dense/model\.safetensors"):
            open_source(tmp_path)

    def test_a_name_that_is_there_twice(self, tmp_path: Path) -> None:
        self.checkpoint(tmp_path)
        save_file({"2_Dense.linear.weight": torch.ones(24, 384)}, tmp_path / "model.safetensors")
        with pytest.raises(ModelLoadError, match=r"2_Dense\.linear\.weight is in two files"):
            describe(tmp_path)

    @pytest.mark.parametrize(
        ("entry", "complaint"),
        [
            ({}, r"config.json: embedding_dense is \{\}; it must be a list of objects"),
            ([7], r"embedding_dense is \[7\]; it must be a list of objects"),
            ([{**LAYERS[0], "name": "../x"}], r'embedding_dense\[0\]: name is "../x"; it must be the name of a folder'),
            ([{"in_features": 3}], r"embedding_dense\[0\]: name is missing"),
            ([*LAYERS[:1], {**LAYERS[0], "out_features": None}], r"embedding_dense\[1\]: name is .* another than that"),
            ([{**LAYERS[0], "in_features": -1}], r"embedding_dense\[0\]: in_features is -1"),
        ],
    )
    def test_an_entry_of_config_json_is_checked(self, entry: Any, complaint: str, tmp_path: Path) -> None:
        self.checkpoint(tmp_path, **{"config.json": {"embedding_dense": entry}})
        with pytest.raises(ModelLoadError, match=complaint):
            checkpoint_tensors(tmp_path, directory_config(tmp_path))


def test_what_cannot_be_read_is_not_asked_for(tmp_path: Path) -> None:
    listed = [5, {"type": 3, "path": "a"}, {"type": OLD_TYPES["Dense"], "path": 3}, *modules(["Transformer", "Dense"])]
    write_files(tmp_path, {"modules.json": json.dumps(listed).encode()})
    assert named_files(tmp_path) == (["1_Dense/config.json"], ["1_Dense/model.safetensors"])
    for content in (b"", b"3", b"{}"):
        write_files(tmp_path, {"modules.json": content})
        assert missing_module_files(tmp_path) == []
