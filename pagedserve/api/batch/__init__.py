"""Files and batches: requests that run when nobody else wants the engine, kept on disk until they are done."""
