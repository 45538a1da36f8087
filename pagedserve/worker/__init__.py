"""One device: its rows of live sequences, its KV storage, and the step. It knows neither groups nor policy."""
