"""What clients send and get: requests as pydantic models (checked), answers as msgspec structs (fast to write)."""
