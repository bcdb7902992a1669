"""HTTP APIs: the requests that they read and the responses that they write."""
