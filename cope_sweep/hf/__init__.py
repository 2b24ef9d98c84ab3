"""Hugging Face transformers: position encodings in its models, and finished runs as models of it.

    model = convert(AutoModelForCausalLM.from_pretrained("…"), [CoPE(p_max=64)], keep_rope=True)

Importing this package registers what `AutoModelForCausalLM` needs to load converted models and exported runs. It is
the only package that imports transformers (in a checkout: `pip install -e '.[hf]'`).
"""

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "cope_sweep.hf needs Hugging Face transformers; in a checkout: pip install -e '.[hf]'", name=error.name
    ) from error

from cope_sweep.hf.convert import ConvertedConfig, ConvertedForCausalLM, convert
from cope_sweep.hf.exported import CopeSweepConfig, CopeSweepForCausalLM, export

__all__ = ["ConvertedConfig", "ConvertedForCausalLM", "CopeSweepConfig", "CopeSweepForCausalLM", "convert", "export"]
