#include "server/guard.h"

#include <stddef.h>
#include <string.h>
#include <strings.h>

static bool is_port(const char *p)
{
    return strlen(p) <= 5 && strspn(p, "0123456789") == strlen(p);
}

/* Whether `text` is `host`, or host:port. An IPv6 address stands in brackets, with or without them in `host`. */
static bool names_host(const char *text, const char *host)
{
    size_t len = strlen(host);
    const char *rest;
    if (len == 0)
        return false;
    if (text[0] == '[' && host[0] != '[' && strchr(host, ':')) {
        if (strncasecmp(text + 1, host, len) != 0 || text[1 + len] != ']')
            return false;
        rest = text + len + 2;
    } else {
        if (strncasecmp(text, host, len) != 0)
            return false;
        rest = text + len;
    }
    return *rest == '\0' || (*rest == ':' && rest[1] && is_port(rest + 1));
}

bool guard_host_is_local(const char *host, const char *bound)
{
    return names_host(host, "localhost") || names_host(host, "127.0.0.1") || names_host(host, "[::1]") || names_host(host, bound);
}

bool guard_origin_is_local(const char *origin, const char *bound)
{
    if (strncasecmp(origin, "http://", 7) == 0)
        return guard_host_is_local(origin + 7, bound);
    if (strncasecmp(origin, "https://", 8) == 0)
        return guard_host_is_local(origin + 8, bound);
    return false;
}

bool guard_key_matches(const char *authorization, const char *key)
{
    if (!authorization || strncasecmp(authorization, "Bearer ", 7) != 0)
        return false;
    const char *given = authorization + 7;
    given += strspn(given, " ");
    const size_t n_given = strlen(given), n_key = strlen(key);
    if (n_key == 0)
        return false;
    unsigned char differs = n_given != n_key;
    for (size_t i = 0; i < n_given; i++)
        differs = (unsigned char)(differs | (given[i] ^ key[i % n_key]));
    return differs == 0;
}
