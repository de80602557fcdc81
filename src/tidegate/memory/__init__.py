"""The ground floor: readings of memory and links, and page-locked memory."""
