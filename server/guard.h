/* server/guard.h: who may talk to a server on this machine. Pure functions over header values.
 *
 * A server on loopback is reachable by every web page the user opens: directly, as another origin, and through a name that an attacker lets point
 * to 127.0.0.1 (DNS rebinding). The first shows in Origin, the second in Host; both are checked. */
#ifndef BEDSIDE_SERVER_GUARD_H
#define BEDSIDE_SERVER_GUARD_H

#include <stdbool.h>

/* Host: localhost, 127.0.0.1, [::1] or the host bound to, each with any port or none. */
bool guard_host_is_local(const char *host, const char *bound);

/* Origin: http or https on one of the same hosts. "null" is not. */
bool guard_origin_is_local(const char *origin, const char *bound);

/* Authorization: "Bearer KEY", the scheme in any case. Takes the same time for every wrong key of the same length. */
bool guard_key_matches(const char *authorization, const char *key);

#endif
