"""Sessions: messages, versions, tools and retries over an engine that knows tokens only."""
