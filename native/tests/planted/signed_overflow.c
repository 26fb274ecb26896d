/* Adds one to the largest int. UndefinedBehaviorSanitizer must end this program. */
#include <limits.h>

int main(int argc, char **argv)
{
    (void)argv;
    volatile int largest = INT_MAX;
    volatile int sum = largest + argc;
    (void)sum;
    return 0;
}
