"""Loaded by `import verl` in every process of a run (VERL_USE_EXTERNAL_MODULES): platform, patches, tokenizer."""

from zmrl.model.tokenizer import register
from zmrl.trainer import patches_verl
from zmrl.trainer import platform_cpu as platform_cpu  # registers itself

patches_verl.check_version()
patches_verl.single_cpu_backend()
register()
