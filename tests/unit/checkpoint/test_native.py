"""The native reader: exact bytes, slices, and every kind of damage refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from k31core.checkpoint.native import INDEX, CheckpointError, NativeCheckpoint
from k31core.checkpoint.tensor_file import TensorFile, TensorFileError, write_tensor_file
from k31core.convert.tiny_model import init_weights
from k31core.model.build import Build, ExpertFormat
from k31core.model.config import load_config
from k31core.model.decoder import Decoder, Packed
from k31core.model.weight_names import IGNORED_PREFIXES, base_slots, expected_names, native_tensors
from k31core.ops.mxfp4 import MxFp4Error
from k31core.parallel.mesh import Axis, Mesh
from tests.model_cases import CASES, P, config_of, load_tensors, random_tensors, write_checkpoint

RAW = config_of(layers=3, mla=(3,))
A_LOG = f"{P}model.layers.0.self_attn.A_log"
SCALE = f"{P}model.layers.1.block_sparse_moe.experts.3.w2.weight_scale"
Q_PROJ = f"{P}model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", RAW)


def load(directory: Path, mesh: Mesh | None = None) -> Decoder:
    decoder = Decoder(load_config(directory), Build(mesh=mesh or Mesh()))
    checkpoint = NativeCheckpoint(directory)
    checkpoint.check_names(expected_names(decoder.config), IGNORED_PREFIXES)
    checkpoint.load(base_slots(decoder), progress=False)
    return decoder


def change(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace (or with None remove) one tensor of the file that holds it; the index keeps naming it."""
    shard = directory / json.loads((directory / INDEX).read_text())["weight_map"][name]
    tensors = load_file(shard)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, shard)


def rewrite_index(directory: Path, add: dict[str, str] | None = None, drop: str | None = None) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"].update(add or {})
    if drop:
        del index["weight_map"][drop]
    (directory / INDEX).write_text(json.dumps(index))


def test_every_tensor_arrives(directory: Path) -> None:
    stored = load_tensors(directory)
    slots = base_slots(load(directory))
    assert {s.name for s in slots} == set(stored)
    for slot in slots:
        expected = stored[slot.name][: len(slot.tensor)] if slot.name.endswith("A_log") else stored[slot.name]
        assert torch.equal(slot.tensor, expected.to(slot.tensor.dtype)), slot.name


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_slices_and_no_other_bytes(directory: Path, rank: int) -> None:
    stored = load_tensors(directory)
    decoder = Decoder(load_config(directory), Build(mesh=Mesh(tp=Axis(2, rank), ep=Axis(4, rank + 1))))
    slots = base_slots(decoder)
    report = NativeCheckpoint(directory).load(slots, progress=False)
    experts = {int(s.name.split(".experts.")[1].split(".")[0]) for s in slots if ".experts." in s.name}
    assert experts == {2 * rank + 2, 2 * rank + 3}
    needed: dict[str, set[int]] = {}
    where = json.loads((directory / INDEX).read_text())["weight_map"]
    for slot in slots:
        full = stored[slot.name]
        padded = slot.name.endswith("A_log")
        part = slot.shard.take(full[: slot.shard.shape[0]] if padded else full)
        assert torch.equal(slot.tensor, part.to(slot.tensor.dtype)), slot.name
        entry = header(directory / where[slot.name])[slot.name]
        numbers = torch.arange(full.nbytes).view(*full.shape, full.element_size())
        wanted = numbers if padded else slot.shard.take(numbers)
        needed.setdefault(where[slot.name], set()).update((wanted + entry).flatten().tolist())
    for shard, ranges in report.requested.items():
        read = [byte for start, length in ranges for byte in range(start, start + length)]
        assert len(read) == len(set(read)) and set(read) == needed[shard], shard
    assert report.bytes < 0.6 * sum(t.nbytes for t in stored.values())
    assert report.tensors == len(slots)
    assert sum(len(ranges) for ranges in report.requested.values()) < len(slots) + sum(
        s.shard.shape[0] - 1 for s in slots if s.shard.dim == 1
    )


def header(path: Path) -> dict[str, int]:
    """Absolute offset of every tensor of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    return {name: 8 + length + e["data_offsets"][0] for name, e in entries.items() if name != "__metadata__"}


def test_known_case_byte_for_byte() -> None:
    report = NativeCheckpoint(CASES / "tiny-k31").load(
        base_slots(Decoder(load_config(CASES / "tiny-k31"), Build())), progress=False
    )
    assert report.bytes == 297760


def test_missing_truncated_and_garbled_shards(directory: Path) -> None:
    shard = sorted(directory.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    for damaged, message in ((content[:-1], "describes"), (content[:100], "cut short"), (b"abc", "too short")):
        shard.write_bytes(damaged)
        with pytest.raises(TensorFileError, match=message) as error:
            load(directory)
        assert shard.name in str(error.value)
    shard.write_bytes(content[:8] + b"!" + content[9:])
    with pytest.raises(TensorFileError, match="not JSON"):
        load(directory)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}: shard is missing"):
        load(directory)


def test_a_missing_scale_tensor_is_named(directory: Path) -> None:
    change(directory, SCALE, None)
    with pytest.raises(CheckpointError, match=SCALE.replace(".", r"\.")):
        load(directory)
    rewrite_index(directory, drop=SCALE)
    with pytest.raises(CheckpointError, match=f"missing, first '{SCALE}'"):
        load(directory)


def test_scale_byte_255_is_named(directory: Path) -> None:
    scale = load_tensors(directory)[SCALE]
    scale[2, 0] = 255
    change(directory, SCALE, scale)
    with pytest.raises(MxFp4Error, match=SCALE.replace(".", r"\.")):
        load(directory)


def test_a_log_padding_must_be_zero(directory: Path) -> None:
    a_log = load_tensors(directory)[A_LOG]
    a_log[77] = 0.5
    change(directory, A_LOG, a_log)
    with pytest.raises(CheckpointError, match=r"A_log has 0.5 at entry 77.*2 heads"):
        load(directory)
    change(directory, A_LOG, a_log[:2].clone())
    with pytest.raises(CheckpointError, match=r"A_log has shape \[2\], this model needs \[128\]"):
        load(directory)


def test_wrong_shape_dtype_and_names(directory: Path) -> None:
    q_proj = load_tensors(directory)[Q_PROJ]
    change(directory, Q_PROJ, q_proj[:-1].clone())
    with pytest.raises(CheckpointError, match=r"q_proj.weight has shape \[31, 32\], this model needs \[32, 32\]"):
        load(directory)
    change(directory, Q_PROJ, q_proj.half())
    with pytest.raises(CheckpointError, match=r"q_proj.weight has dtype F16, this model needs BF16"):
        load(directory)
    change(directory, Q_PROJ, q_proj)
    shard = json.loads((directory / INDEX).read_text())["weight_map"][Q_PROJ]
    rewrite_index(directory, add={"vision_tower.x": shard, "mm_projector.y": shard})
    load(directory)
    rewrite_index(directory, add={f"{P}model.layers.7.input_layernorm.weight": shard})
    with pytest.raises(CheckpointError, match=r"unknown to this model, first .*layers\.7"):
        load(directory)
    rewrite_index(directory, add={"x": "../outside.safetensors"})
    with pytest.raises(CheckpointError, match="not a file of this directory"):
        load(directory)


def test_fp32_convolution_weights_are_accepted(directory: Path) -> None:
    name = f"{P}model.layers.0.self_attn.q_conv1d.weight"
    exact = load_tensors(directory)[name].float() + 1e-4
    change(directory, name, exact)
    assert torch.equal(load(directory).model.layers["0"].self_attn.q_conv1d.weight, exact)


def test_export_restores_every_tensor(directory: Path) -> None:
    stored = random_tensors(RAW)
    exported = dict(native_tensors(load(directory)))
    assert set(exported) == set(stored)
    for name, tensor in stored.items():
        assert exported[name].dtype == tensor.dtype, name
        assert torch.equal(exported[name], tensor), name


def test_a_densely_trained_model_becomes_a_native_checkpoint(tmp_path: Path, directory: Path) -> None:
    from k31core.checkpoint.native import write_native_checkpoint

    config = load_config(directory)
    dense = Decoder(config, Build(experts=ExpertFormat.DENSE, train_base=True))
    init_weights(dense, seed=4)
    write_native_checkpoint(tmp_path / "out", RAW, native_tensors(dense), shard_bytes=50_000)
    packed = load(tmp_path / "out")
    batch = Packed(torch.arange(20), torch.tensor([0, 20]))
    with torch.no_grad():
        hidden = [decoder(batch) for decoder in (dense, packed)]
    assert 0 < float((hidden[0] - hidden[1]).norm() / hidden[0].norm()) < 0.5  # BF16 and MXFP4 rounding, nothing worse
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2 and not list((tmp_path / "out").glob("*.partial"))


def test_tensor_file_agrees_with_safetensors(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(5, 7, 3),
        "b": torch.arange(11, dtype=torch.uint8),
        "c": torch.randn(4, 6).bfloat16(),
        "empty": torch.zeros(0, 3),
    }
    write_tensor_file(tmp_path / "x.safetensors", tensors)
    assert all(torch.equal(load_file(tmp_path / "x.safetensors")[k], v) for k, v in tensors.items())
    with TensorFile(tmp_path / "x.safetensors") as file:
        assert torch.equal(file.read("a", 1, 2, 3), tensors["a"][:, 2:5])
        assert file.requested[-1][1] == 3 * 3 * 4 and len(file.requested) == 5
        assert torch.equal(file.read("a", 0, 1, 2), tensors["a"][1:3])
        assert len(file.requested) == 6
