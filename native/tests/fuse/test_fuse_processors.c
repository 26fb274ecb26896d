/* Tests lists of processors as sysfs writes them. */
#include "check.h"
#include "threads/processors.h"

static uint32_t count(const char *list)
{
    uint32_t found = 0;
    for (uint32_t i = 0; i <= PROCESSORS_MAX; i++) {
        found += processors_has(list, i);
    }
    return found;
}

int main(void)
{
    char online[PROCESSOR_LIST_BYTES];
    CHECK_EQ(count("0\n"), 1);
    CHECK_EQ(count("0-1\n"), 2);
    CHECK_EQ(count("0-3,8,10-11\n"), 7);
    CHECK(processors_has("0-3,8,10-11\n", 8) && processors_has("0-3,8,10-11\n", 11));
    CHECK(!processors_has("0-3,8,10-11\n", 4) && !processors_has("0-3,8,10-11\n", 12));
    CHECK_EQ(count("\n"), 0);
    CHECK_EQ(count(""), 0);
    if (processors_read_online(online)) {
        CHECK(count(online) >= 1 && count(online) <= processors_possible());
    }
    return 0;
}
