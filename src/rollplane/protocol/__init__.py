"""What crosses the wire: requests, responses, events, side payloads, administration. No I/O in here."""
