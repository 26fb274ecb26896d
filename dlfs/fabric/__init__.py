"""NVMe-oF control: discovery, export and composing of targets."""
