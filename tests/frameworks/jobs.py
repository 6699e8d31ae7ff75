"""The jobs that the tests train: the examples as they are, and scripts of this folder for what an example would not
show. Each is run as plain FSDP and with FCDP=1."""

import importlib.util
import pathlib
from dataclasses import dataclass

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Framework:
    """`needs`: what must be installed. `warm`: what is imported before the ranks are forked."""

    needs: tuple = ()
    warm: tuple = ()


@dataclass
class Job:
    """`most`: the bytes between nodes that FCDP's gathers may send, over those of plain FSDP's. `unserved`: groups that
    are left to plain FSDP. `before`: the arguments of a launch of its own, from whose checkpoint the job goes on."""

    script: pathlib.Path
    framework: Framework = Framework()
    arguments: tuple = ()
    fsdp: str = "fsdp2"
    most: float = 0.7
    unserved: int = 0
    frozen: bool = False
    before: tuple = ()

    def missing(self):
        return [name for name in self.framework.needs if importlib.util.find_spec(name) is None]


HF = Framework(
    ("accelerate", "datasets", "peft", "transformers", "trl"),
    (
        "accelerate.accelerator",
        "peft",
        "transformers.trainer",
        "transformers.models.llama.modeling_llama",
        "trl.trainer.sft_trainer",
        "trl.trainer.dpo_trainer",
    ),
)
LIGHTNING = Framework(("lightning",), ("lightning",))
TITAN = Framework(("torchtitan",), ("torchtitan.train", "torchtitan.models.llama3.config_registry"))
TORCHAO = Framework(("torchao",), ("torchao.float8", "torchao.quantization.qat"))
PEFT = Framework(("peft", "transformers"), ("peft", "transformers.models.llama.modeling_llama"))
SENTENCES = Framework(
    ("datasets", "sentence_transformers"), ("sentence_transformers", "transformers.models.bert.modeling_bert")
)
DIFFUSERS = Framework(("diffusers",), ("diffusers.models.unets.unet_2d",))
BITSANDBYTES = Framework(
    ("accelerate", "bitsandbytes", "peft", "transformers"),
    ("accelerate.accelerator", "bitsandbytes", "peft", "transformers.models.llama.modeling_llama"),
)

# Those that tools/test.sh runs.
JOBS = {
    "fsdp1": Job(EXAMPLES / "fsdp1.py", fsdp="fsdp1"),
    "accelerate-lora": Job(EXAMPLES / "accelerate_lora.py", HF, most=0.2, frozen=True),
    "transformers-trainer": Job(EXAMPLES / "transformers_trainer.py", HF),
    "lightning-fabric": Job(EXAMPLES / "lightning_fabric.py", LIGHTNING),
}

# Those that tools/test.sh --frameworks runs beside them.
MORE = {
    "fsdp2": Job(EXAMPLES / "fsdp2.py"),
    "trl-sft": Job(EXAMPLES / "trl_sft.py", HF, most=0.3, frozen=True),
    "torchtitan": Job(EXAMPLES / "torchtitan_llama.py", TITAN),  # half a minute of two cores
    **{
        f"accelerate-fsdp{version}-{precision}-states": Job(
            HERE / "accelerate_states.py", HF, (version, precision), fsdp=f"fsdp{version}"
        )
        for version in "12"
        for precision in ("no", "bf16")
    },
    "transformers-trainer-resumes": Job(HERE / "trainer_resume.py", HF),
    "qlora-bfloat16": Job(HERE / "qlora.py", arguments=("bfloat16",), most=0.3, frozen=True),
    "qlora-uint8": Job(HERE / "qlora.py", arguments=("uint8",), most=0.3, frozen=True),
    "trl-dpo-adapters": Job(HERE / "trl_dpo.py", HF, ("adapters",), most=0.2, frozen=True),
    "trl-dpo-whole": Job(HERE / "trl_dpo.py", HF, ("whole",)),
    "lightning-trainer": Job(HERE / "lightning_trainer.py", LIGHTNING),
    **{
        f"torchtitan-{variant}": Job(HERE / "torchtitan_variants.py", TITAN, (variant,))
        for variant in ("compiled", "checkpointed", "tensor_parallel")
    },
    "torchtitan-resumes": Job(
        HERE / "torchtitan_variants.py", TITAN, ("saved",), before=("saved", "--training.steps", "3")
    ),
    **{
        f"torchao-{variant}": Job(HERE / "torchao_variants.py", TORCHAO, (variant,), most=most, frozen=variant == "nf4")
        for variant, most in {"float8": 0.7, "float8_gathered": 0.7, "qat": 0.7, "nf4": 0.3}.items()
    },
    "peft-methods": Job(HERE / "peft_methods.py", PEFT, most=0.5, frozen=True),
    "sentence-transformers": Job(HERE / "sentence_trainer.py", SENTENCES),
    "diffusers": Job(HERE / "diffusers_unet.py", DIFFUSERS),
    **{
        f"bitsandbytes-fsdp{version}": Job(
            HERE / "bitsandbytes_4bit.py", BITSANDBYTES, (version,), fsdp=f"fsdp{version}", most=0.5, frozen=True
        )
        for version in "12"
    },
    "pipeline": Job(HERE / "pipeline.py", arguments=("dp,pp",)),
    # Each shard group lies inside one node: plain FSDP runs.
    "pipeline-inside-the-nodes": Job(HERE / "pipeline.py", arguments=("pp,dp",), unserved=3),
    "torchtitan-hybrid": Job(HERE / "torchtitan_variants.py", TITAN, ("hybrid",), unserved=8),
}
