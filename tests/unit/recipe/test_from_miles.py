"""docs/from-miles.md names every flag of the two launch commands, and only fields that exist."""

import re
from pathlib import Path

from k31core.recipe.recipe import Recipe
from k31core.recipe.section import Section

TEXT = (Path(__file__).parents[3] / "docs" / "from-miles.md").read_text()
FLAGS = re.findall(
    r"\S+",
    """
--mode --model-variant --task --reward-model --num-nodes --num-gpus-per-node --pipeline-parallel-size
--context-parallel-size --rollout-tp-size --rollout-max-concurrency --lora-rank --lora-alpha --num-rollout
--rollout-batch-size --n-samples-per-prompt --rollout-max-response-len --sglang-max-total-tokens --global-batch-size
--lr --eval-interval --distributed-timeout-minutes --hf-checkpoint --ref-load --sglang-path --data-dir
--enable-wandb --model-dir --save-dir --save --bf16 --tensor-model-parallel-size --sequence-parallel
--pipeline-model-parallel-size --expert-model-parallel-size --expert-tensor-parallel-size --megatron-to-hf-mode
--model-name --skip-saving --extra-args --lora-adapter-path --no-load-optim --use-dynamic-batch-size --loss-type
--rollout-top-logprobs-num --use-rollout-logprobs --rm-type --use-rollout-routing-replay --sglang-tp-size
--sglang-ep-size --sglang-attn-dp-size --sglang-moe-runner-backend --sglang-lora-backend --sglang-kv-cache-dtype
--sglang-load-balance-method --lora-base-cpu-backup --optimizer-cpu-offload --optimizer-offload-fraction
--overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer --experts-shared-outer-loras
--check-lora-weight-equal --extra-env-vars
""",
)
SECTIONS = "model|data|rollout|reward|algorithm|train|eval|save|sync|cluster|watchdog|observe|env|health"


def exists(path: str) -> bool:
    kind: type[Section] | None = Recipe
    for name in path.split("."):
        if kind is None or name not in kind.model_fields:
            return False
        annotation = kind.model_fields[name].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        kind = next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)
    return True


def test_every_flag_has_a_row() -> None:
    named = set(re.findall(r"--[a-z0-9-]+", TEXT))
    assert [flag for flag in FLAGS if flag not in named] == []


def test_every_field_exists() -> None:
    fields = re.findall(rf"`((?:{SECTIONS})(?:\.[a-z_0-9]+)+)`", TEXT)
    assert len(set(fields)) > 45
    assert [field for field in fields if not exists(field)] == []
