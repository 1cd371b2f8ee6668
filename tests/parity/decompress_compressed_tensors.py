"""Judge: the weights of directories as the compressed-tensors package decompresses them, or converts those of AutoAWQ.

Runs inside vLLM's environment, which contains the package, and imports nothing of peagle. Writes `judged.out`, in
safetensors' format, into each directory.

    python decompress_compressed_tensors.py DIRECTORY ...
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file


def decompress(directory: Path) -> None:
    stored = json.loads((directory / "config.json").read_text())["quantization_config"]
    if stored["quant_method"] == "awq":
        converter = AutoAWQConverter.from_autoawq_config(stored)
        config, convert = converter.create_config(), converter.process
    else:
        config, convert = QuantizationConfig.model_validate(stored), dict
    (scheme,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config.format)
    tensors = convert(load_file(directory / "model.safetensors"))
    decompressed = {}
    for name in tensors:
        if name.endswith(".weight_scale"):
            module = name.removesuffix("weight_scale")
            own = {key.removeprefix(module): each for key, each in tensors.items() if key.startswith(module)}
            if scheme.weights.strategy == "block":
                # The compressor infers blocks from shapes, which fails if they do not divide the weight.
                weight = dequantize(own["weight"], own["weight_scale"], args=scheme.weights)
            else:
                weight = compressor.decompress(own, scheme)["weight"]
            decompressed[f"{module}weight"] = weight.contiguous()
    save_file(decompressed, directory / "judged.out")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        decompress(Path(argument))
    print(f"compressed-tensors {version('compressed-tensors')}: {len(sys.argv) - 1} directories")
