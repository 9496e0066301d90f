"""axolotl: ``plugins: [qsdp.integrations.axolotl.QSDPPlugin]`` in the YAML, FSDP2 switched on.

plugins:
  - qsdp.integrations.axolotl.QSDPPlugin
qsdp_preset: w8g8
qsdp_keep_full_precision: ["*.lm_head.*"]     # optional
fsdp_version: 2
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, field_validator

from qsdp import QSDPConfig
from qsdp.integrations.transformers import QSDPCallback

try:
    from axolotl.integrations.base import BasePlugin
except ImportError as error:
    raise ImportError(
        f"qsdp.integrations.axolotl needs axolotl ({error}): install it as its own pages say"
    ) from error


class QSDPArgs(BaseModel):  # type: ignore[misc, unused-ignore]
    """The keys that the plugin adds to axolotl's YAML."""

    qsdp_preset: str = "w8g8"
    qsdp_keep_full_precision: list[str] = []

    @field_validator("qsdp_preset")
    @classmethod
    def _known(cls, preset: str) -> str:
        QSDPConfig.preset(preset)
        return preset


class QSDPPlugin(BasePlugin):  # type: ignore[misc]
    """Gives axolotl's trainer a :class:`qsdp.integrations.transformers.QSDPCallback`."""

    def get_input_args(self) -> str:
        return "qsdp.integrations.axolotl.QSDPArgs"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[QSDPCallback]:
        kept = dict.fromkeys(cfg.qsdp_keep_full_precision or ())
        return [QSDPCallback(QSDPConfig.preset(cfg.qsdp_preset).with_exceptions(kept))]
