"""torchtitan 0.2: its Llama with quantized communication, under a name of its own.

torchrun --nproc-per-node 8 examples/torchtitan_qsdp.py \
  --model.name llama3_w8g8 --model.flavor debugmodel

With torchtitan 0.3 a configuration function does it, in the module that `--module` names:

    def llama3_debugmodel_w8g8() -> Trainer.Config:
        config = llama3_debugmodel()
        config.model_spec = quantized_spec(config.model_spec, "w8g8")
        return config
"""

from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.train import Trainer, main

from qsdp.integrations.torchtitan import quantized_spec, save_comm_state

for comm in ("w8g8", "w4g4"):
    spec = quantized_spec(get_train_spec("llama3"), comm)
    register_train_spec(f"llama3_{comm}", spec)


class QSDPTrainer(Trainer):
    """Checkpoints hold what communication remembers, for runs that go on bit for bit."""

    def __init__(self, config):
        super().__init__(config)
        save_comm_state(self)


if __name__ == "__main__":
    main(QSDPTrainer)
