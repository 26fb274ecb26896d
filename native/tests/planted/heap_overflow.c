/* Writes one byte after an allocation. AddressSanitizer must end this program. */
#include <stdlib.h>
#include <string.h>

int main(void)
{
    volatile size_t length = 9; /* volatile, so that the compiler does not know the length */
    char *bytes = malloc(8);
    if (bytes == NULL) {
        return 0;
    }
    memset(bytes, 1, length);
    int unused = bytes[0] == 2; /* used, so that the compiler keeps the memset */
    free(bytes);
    return unused;
}
