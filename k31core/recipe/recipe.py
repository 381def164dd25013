"""The whole recipe: one frozen tree that describes a run completely."""

from typing import Self

from pydantic import Field, model_validator

from k31core.recipe.algorithm import AlgorithmRecipe, EvalRecipe, RewardRecipe, WatchdogRecipe
from k31core.recipe.data import DataRecipe
from k31core.recipe.health import HealthRecipe
from k31core.recipe.model import ModelRecipe
from k31core.recipe.rollout import RolloutRecipe
from k31core.recipe.run import ClusterRecipe, EnvRecipe, ObserveRecipe, SaveRecipe, SyncRecipe
from k31core.recipe.section import Section
from k31core.recipe.train import TrainRecipe


class Recipe(Section):
    """A named, complete description of a run. Flags only override it."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    description: str = ""
    seed: int = Field(0, ge=0)
    num_rollout: int = Field(100, ge=1)
    """Steps of the run: each is one rollout, one optimizer step, one sync."""
    model: ModelRecipe
    data: DataRecipe
    rollout: RolloutRecipe
    reward: RewardRecipe = RewardRecipe()
    algorithm: AlgorithmRecipe = AlgorithmRecipe()
    train: TrainRecipe
    eval: EvalRecipe = EvalRecipe()
    save: SaveRecipe = SaveRecipe()
    sync: SyncRecipe = SyncRecipe()
    cluster: ClusterRecipe = ClusterRecipe()
    watchdog: WatchdogRecipe = WatchdogRecipe()
    observe: ObserveRecipe = ObserveRecipe()
    env: EnvRecipe = EnvRecipe()
    health: HealthRecipe = HealthRecipe()

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def num_engines(self) -> int:
        """Engines that share the GPUs: one, or as many as fit beside each other (`gpus / tp_size`)."""
        if self.rollout.engine.kind == "embedded":
            return 1
        return max(1, self.cluster.num_nodes * self.cluster.gpus_per_node // self.rollout.engine.tp_size)

    @property
    def nodes_per_engine(self) -> int:
        """Nodes that one engine spans."""
        return max(1, -(-self.rollout.engine.tp_size // max(1, self.cluster.gpus_per_node)))

    @property
    def candidate_mode(self) -> str:
        """`selected` for unfiltered sampling, `support` for filtered: derived, never chosen."""
        return "selected" if self.rollout.unfiltered else "support"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.algorithm.loss == "score_centering" and self.rollout.top_logprobs_num == 0:
            raise ValueError(
                "rollout.top_logprobs_num is 0: score centering needs the sampler's candidates; use 128 (the recipe)"
            )
        if self.global_batch_size % self.train.parallel.dp:
            raise ValueError(
                f"train.parallel.dp {self.train.parallel.dp} does not divide the global batch "
                f"{self.rollout.prompts_per_step} x {self.rollout.samples_per_prompt} = {self.global_batch_size}"
            )
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        if longest > self.train.max_tokens_per_gpu * self.train.parallel.cp:
            raise ValueError(
                f"one sample can have {longest} tokens (data.max_prompt_tokens + "
                f"rollout.max_response_tokens), "
                f"more than train.max_tokens_per_gpu x cp = {self.train.max_tokens_per_gpu * self.train.parallel.cp}"
            )
        if longest > self.rollout.engine.max_total_tokens:
            raise ValueError(
                f"rollout.engine.max_total_tokens {self.rollout.engine.max_total_tokens} cannot hold one sample of "
                f"{longest} tokens"
            )
        if self.rollout.indexer_replay and self.model.family != "kimi_k31":
            raise ValueError("rollout.indexer_replay needs model.family 'kimi_k31': Kimi-K3 has no DSA indexer")
        self._check_devices()
        return self

    def _check_devices(self) -> None:
        gpus = self.cluster.num_nodes * self.cluster.gpus_per_node
        world = self.train.parallel.world_size
        if self.train.device == "cuda" and gpus != world:
            raise ValueError(
                f"train.parallel has {world} ranks (TP·PP·CP·DP) but the cluster has {gpus} GPUs "
                f"({self.cluster.num_nodes} x {self.cluster.gpus_per_node}): they must be equal"
            )
        if self.rollout.engine.kind == "embedded":
            if self.sync.transport not in ("in_process", "shared_files"):
                raise ValueError(
                    f"sync.transport {self.sync.transport!r} needs an SGLang engine; use 'shared_files' with 'embedded'"
                )
        else:
            self._check_sglang(gpus)

    def _check_sglang(self, gpus: int) -> None:
        engine = self.rollout.engine
        if self.sync.transport == "in_process":
            raise ValueError("sync.transport 'in_process' needs the embedded engine; use 'cuda_ipc' with 'sglang'")
        self._check_transport()
        if gpus and gpus % engine.tp_size:
            raise ValueError(
                f"rollout.engine.tp_size {engine.tp_size} does not divide the cluster's {gpus} GPUs "
                f"(cluster.num_nodes x cluster.gpus_per_node)"
            )
        if engine.server_urls and len(engine.server_urls) != self.num_engines:
            raise ValueError(
                f"rollout.engine.server_urls names {len(engine.server_urls)} servers, the cluster holds "
                f"{self.num_engines} engines of tp_size {engine.tp_size}"
            )
        if not engine.lora_base_cpu_backup and not self.sync.resend_base:
            raise ValueError(
                "rollout.engine.lora_base_cpu_backup is off, so the engine loses its base when it sleeps: "
                "set sync.resend_base: true"
            )
        if engine.lora_base_cpu_backup and self.sync.resend_base:
            raise ValueError(
                "sync.resend_base is true although rollout.engine.lora_base_cpu_backup keeps the base on the host: "
                "turn one of them off"
            )
        if self.rollout.top_logprobs_num and not self.rollout.unfiltered:
            raise ValueError(
                f"rollout.temperature {self.rollout.temperature}, top_p {self.rollout.top_p}, top_k "
                f"{self.rollout.top_k} with rollout.top_logprobs_num {self.rollout.top_logprobs_num}: SGLang records "
                f"log-probs before the filter, so filtered sampling has no known support; use 1.0, 1.0 and 0"
            )
        broadcast = self.env.variables.get("SGLANG_DSA_TOPK_BROADCAST", "1")
        if self.model.family == "kimi_k31" and engine.attn_dp_size > 1 and broadcast != "1":
            raise ValueError(
                f"env.variables.SGLANG_DSA_TOPK_BROADCAST is {broadcast!r}: with rollout.engine.attn_dp_size "
                f"{engine.attn_dp_size} the ranks of a group would pick different keys; set it to '1'"
            )

    def _check_transport(self) -> None:
        """A way of publishing that this engine and these cards cannot take."""
        sync, cards = self.sync, self.train.device == "cuda"
        if cards and sync.transport == "cuda_ipc" and not self.cluster.colocate:
            raise ValueError(
                "sync.transport 'cuda_ipc' hands over memory of a card that trainer and engine share: set "
                "cluster.colocate: true, or use 'nccl' or 'shared_files'"
            )
        if cards and sync.transport == "nccl" and self.cluster.colocate:
            raise ValueError(
                "sync.transport 'nccl' broadcasts between cards, and one card cannot be two ranks of a group: set "
                "cluster.colocate: false, or use 'cuda_ipc'"
            )
        if sync.transport == "nccl" and (self.nodes_per_engine > 1 or self.num_engines > 1):
            raise ValueError(
                f"sync.transport 'nccl' has its receiver beside one engine on one node, there are {self.num_engines} "
                f"engines of {self.nodes_per_engine} nodes: use 'cuda_ipc' or 'shared_files'"
            )
        if sync.resend_base and sync.transport != "cuda_ipc":
            raise ValueError(
                f"sync.resend_base streams the base by handle, sync.transport {sync.transport!r} has none: "
                f"use 'cuda_ipc'"
            )
        by_memory = sync.transport in ("cuda_ipc", "nccl")
        if by_memory and sync.check_lora_weight_equal and sync.expert_rows == "own" and self.rollout.engine.ep_size > 1:
            raise ValueError(
                "sync.check_lora_weight_equal gives every engine rank the same list of checksums, sync.expert_rows "
                "'own' gives each another part: set sync.expert_rows: all"
            )
