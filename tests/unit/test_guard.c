/* Who may talk to the server: header values, as a page that attacks it would send them. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/guard.h"

static void this_machine_is_let_in_under_each_of_its_names(void **state)
{
    (void)state;
    const char *const hosts[] = {"localhost", "LocalHost:8080", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:65535"};
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++)
        assert_true(guard_host_is_local(hosts[i], "127.0.0.1"));
    assert_true(guard_host_is_local("127.0.0.2:80", "127.0.0.2"));
    assert_true(guard_host_is_local("[::1]:80", "::1"));
    assert_true(guard_host_is_local("ward.local:80", "ward.local"));
}

static void another_name_is_kept_out_however_it_resembles(void **state)
{
    (void)state;
    const char *const hosts[] = {"",
                                 "evil.example",
                                 "localhost.evil.example",
                                 "127.0.0.1.evil.example",
                                 "evil.example:localhost",
                                 "localhostx",
                                 "xlocalhost",
                                 "localhost:",
                                 "localhost:80x",
                                 "localhost:123456",
                                 "127.0.0.2",
                                 "[::1].evil",
                                 "[::1",
                                 "[::2]",
                                 "localhost@evil.example",
                                 "::1",
                                 "localhost/evil",
                                 " localhost",
                                 "localhost ",
                                 "[localhost]",
                                 "127.0.0.1:80:80"};
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++)
        if (guard_host_is_local(hosts[i], "127.0.0.1"))
            fail_msg("let in: '%s'", hosts[i]);
    assert_false(guard_host_is_local("", ""));
    assert_false(guard_host_is_local(":80", ""));
}

static void only_pages_of_this_machine_are_local_origins(void **state)
{
    (void)state;
    assert_true(guard_origin_is_local("http://localhost:5173", "127.0.0.1"));
    assert_true(guard_origin_is_local("https://127.0.0.1", "127.0.0.1"));
    assert_true(guard_origin_is_local("HTTP://[::1]:3000", "127.0.0.1"));
    const char *const origins[] = {"",
                                   "null",
                                   "localhost",
                                   "file://",
                                   "http://",
                                   "http://evil.example",
                                   "http://localhost.evil.example",
                                   "ftp://localhost",
                                   "https:/localhost",
                                   "http://localhost:5173/",
                                   "http://user@localhost",
                                   "chrome-extension://localhost"};
    for (size_t i = 0; i < sizeof origins / sizeof *origins; i++)
        if (guard_origin_is_local(origins[i], "127.0.0.1"))
            fail_msg("let in: '%s'", origins[i]);
}

static void only_the_whole_key_opens(void **state)
{
    (void)state;
    assert_true(guard_key_matches("Bearer secret", "secret"));
    assert_true(guard_key_matches("bearer   secret", "secret"));
    const char *const wrong[] = {"",
                                 "secret",
                                 "Bearer",
                                 "Bearer ",
                                 "Bearer s",
                                 "Bearer secre",
                                 "Bearer secrets",
                                 "Bearer secretsecret",
                                 "Bearer Secret",
                                 "Bearer secret ",
                                 "Basic secret",
                                 "Bearer  ",
                                 "Bearersecret"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        if (guard_key_matches(wrong[i], "secret"))
            fail_msg("opened: '%s'", wrong[i]);
    assert_false(guard_key_matches(NULL, "secret"));
    assert_false(guard_key_matches("Bearer ", "")); /* no key is not an empty key */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(this_machine_is_let_in_under_each_of_its_names),
        cmocka_unit_test(another_name_is_kept_out_however_it_resembles),
        cmocka_unit_test(only_pages_of_this_machine_are_local_origins),
        cmocka_unit_test(only_the_whole_key_opens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
