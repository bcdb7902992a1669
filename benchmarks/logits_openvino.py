"""OpenVINO's logits of given tokens: `python benchmarks/logits_openvino.py MODEL THREADS TOKENS NUM_LAST OUT`.

It runs with the Python of a virtual environment that has OpenVINO, and imports nothing of ours. TOKENS and OUT are as
in benchmarks/accuracy.py.
"""

import sys
from pathlib import Path
from typing import Any

MODEL = "openvino_model.xml"


def main() -> None:
    import numpy
    import openvino

    directory, num_threads, tokens, num_last, out = sys.argv[1:]
    options = {"INFERENCE_NUM_THREADS": int(num_threads), "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(Path(directory) / MODEL, "CPU", options)
    names = {name for given in compiled.inputs for name in given.names}
    ids = numpy.fromfile(tokens, numpy.int32).astype(numpy.int64)[None]
    length, first = ids.shape[1], ids.shape[1] - int(num_last)

    def run(request: Any, begin: int, end: int) -> Any:
        """Return the logits of tokens [begin, end), which follow those that the request has had before."""
        known = {
            "input_ids": ids[:, begin:end],
            "attention_mask": numpy.ones((1, end), numpy.int64),
            "position_ids": numpy.arange(begin, end, dtype=numpy.int64)[None],
            "beam_idx": numpy.zeros(1, numpy.int32),
        }
        request.infer({name: value for name, value in known.items() if name in names})
        return request.get_tensor("logits").data[0].astype(numpy.float32)

    request = compiled.create_infer_request()
    found = [run(request, 0, length)[first:]]
    request.reset_state()
    run(request, 0, first)
    found += [run(request, place, place + 1) for place in range(first, length)]
    numpy.concatenate(found).tofile(out)


if __name__ == "__main__":
    main()
