"""A real Kubernetes for tests, on this machine: two nodes, and an image that is built of docs/kubernetes/Dockerfile."""
