/* Two threads count in one plain variable. ThreadSanitizer must end this program with an error. */
#include <pthread.h>
#include <stddef.h>

static long counter;

static void *count(void *unused)
{
    for (int i = 0; i < 100000; i++) {
        counter++;
    }
    return unused;
}

int main(void)
{
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        if (pthread_create(&threads[i], NULL, count, NULL) != 0) {
            return 0;
        }
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
    }
    return 0;
}
