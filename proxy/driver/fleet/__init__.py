"""Several llama-servers behind one proxy: by model, or with the same one."""
