"""Loading an adapter directory into the engine's model: everything is checked before anything is changed."""

from pathlib import Path

import torch

from k31core.checkpoint.adapter import WEIGHTS_FILE, load_adapter, read_adapter_config
from k31core.checkpoint.adapter_digest import LogicalDigest
from k31core.checkpoint.commit import is_committed, read_manifest
from k31core.checkpoint.tensor_file import NAMES, TensorFile
from k31core.model.decoder import Decoder
from k31core.model.weight_names import adapter_slots
from k31core.rollout.engine import AdapterRefusedError


def swap_adapter(decoder: Decoder, directory: Path, base_digest: str | None = None) -> str:
    """Serve the adapter at `directory` from now on; returns the digest of the tensors as they now lie in memory.

    Raises AdapterRefusedError, with the old adapter untouched, for a missing or damaged file, a non-finite value,
    another rank, alpha or set of targets, shapes of another base, or a manifest that names another base.
    """
    lora = decoder.build.lora
    if lora is None:
        raise AdapterRefusedError(f"{directory}: this engine serves the base alone (it was built without LoRA)")
    try:
        _check_manifest(directory, base_digest)
        config = read_adapter_config(directory)
        targets = set(lora.targets if config.targets is None else config.targets)
        for name, seen, expected in (
            ("r", config.rank, lora.rank),
            ("lora_alpha", config.alpha, lora.alpha),
            ("target_modules", sorted(targets), sorted(lora.targets)),
        ):
            if seen != expected:
                raise AdapterRefusedError(f"{directory}: {name} is {seen}, this engine serves {expected}")
        load_adapter(directory, adapter_slots(decoder))
        return digest_in_memory(decoder, directory)
    except AdapterRefusedError:
        raise
    except (ValueError, OSError) as error:
        raise AdapterRefusedError(f"adapter refused, the old one is still served: {error}") from error


def digest_in_memory(decoder: Decoder, directory: Path) -> str:
    """Digest of the served factors in the dtypes of the file at `directory` (exact when nothing was lost)."""
    digest = LogicalDigest()
    with TensorFile(directory / WEIGHTS_FILE) as file:
        for slot in sorted(adapter_slots(decoder), key=lambda s: s.name):
            dtype = file.entries[slot.name].dtype
            values = slot.tensor.detach().to(device="cpu", dtype=dtype).contiguous()
            take = digest.begin(slot.name, NAMES[dtype], tuple(values.shape))
            take(values.view(torch.uint8).numpy().data)
    return str(digest.hexdigest())


def _check_manifest(directory: Path, base_digest: str | None) -> None:
    """A committed directory says which base its adapter belongs to; a bare one is judged by its shapes alone."""
    if base_digest is None or not is_committed(directory):
        return
    seen = read_manifest(directory)["facts"].get("base_digest")
    if seen is not None and seen != base_digest:
        raise AdapterRefusedError(
            f"{directory}: the adapter was trained on base {str(seen)[:12]}, this engine serves {base_digest[:12]}; "
            "start the engine with the adapter's own checkpoint"
        )
