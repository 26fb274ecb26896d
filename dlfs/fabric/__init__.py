"""NVMe-oF control: discovery of targets, and recipes that export devices from storage nodes."""
