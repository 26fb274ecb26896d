/* Writes one byte behind an allocation. AddressSanitizer must end this program. */
#include <stdlib.h>
#include <string.h>

int main(void)
{
    volatile size_t length = 9; /* volatile: the compiler must not see what is coming */
    char *bytes = malloc(8);
    if (bytes == NULL) {
        return 0;
    }
    memset(bytes, 1, length);
    int unused = bytes[0] == 2; /* used, or the compiler drops the memset */
    free(bytes);
    return unused;
}
