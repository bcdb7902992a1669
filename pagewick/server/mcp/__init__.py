"""Tools of MCP servers (https://modelcontextprotocol.io), which this server runs itself when the model calls them."""
