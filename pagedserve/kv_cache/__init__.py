"""Who owns which KV block: pools, tables, prefix sharing. `manager.KVCacheManager` is the face of this room."""
