/* A list is a line of ranges, as the kernel prints sets of processors. */
#include "threads/processors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool read_list(const char *path, char *list)
{
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return false;
    }
    bool got = fgets(list, PROCESSOR_LIST_BYTES, file) != NULL;
    (void)fclose(file);
    return got;
}

bool processors_has(const char *list, uint32_t number)
{
    while (*list >= '0' && *list <= '9') {
        char *end;
        unsigned long first = strtoul(list, &end, 10);
        unsigned long last = *end == '-' ? strtoul(end + 1, &end, 10) : first;
        if (number >= first && number <= last) {
            return true;
        }
        list = *end == ',' ? end + 1 : end;
    }
    return false;
}

uint32_t processors_possible(void)
{
    char list[PROCESSOR_LIST_BYTES];
    if (!read_list("/sys/devices/system/cpu/possible", list)) {
        return 0;
    }
    uint32_t possible = 0;
    while (possible <= PROCESSORS_MAX && processors_has(list, possible)) {
        possible++;
    }
    return strchr(list, ',') == NULL && possible <= PROCESSORS_MAX ? possible : 0;
}

bool processors_read_online(char *list)
{
    return read_list("/sys/devices/system/cpu/online", list);
}
