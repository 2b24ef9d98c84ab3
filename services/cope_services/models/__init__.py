"""Models of finished runs behind the routes: batching, perplexity, probes, the OpenAI protocol."""
