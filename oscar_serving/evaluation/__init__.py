"""Quality of a quantized cache: fidelity to the unquantized model, retrieval, tasks, and reports of them."""
