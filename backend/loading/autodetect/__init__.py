"""Models without a family of their own: found by their structure."""
