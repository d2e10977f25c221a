"""A film recommender with embedding tables on parameter servers, trained by workers that do not wait for each other.

replicax launch --workers 4 --ps 2 examples/recommender.py    # a process for each task
python examples/recommender.py --workers 2                    # the same tasks as threads of one process

The ratings are simulated: a user likes some genres more than others, a film has a genre and a quality, and chance adds
half a star. So we know what users like, and that no recommender can be better than half a star. `--ratings FILE` reads
real ratings instead, from a file in the format of MovieLens' ratings.csv (userId,movieId,rating,...).
"""

import argparse
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx
from replicax.coordinator import ClusterCoordinator, Server, experimental_get_current_worker_index

GENRES = ["Action", "Animation", "Comedy", "Crime", "Drama", "Fantasy", "Horror", "Musical", "Romance", "Western"]
WIDTH, BATCH, NOISE = 16, 1024, 0.5

parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=2, help="of the job in one process; else the launcher says it")
parser.add_argument("--steps", type=int, default=2000, help="of all workers together")
parser.add_argument("--ratings", help="a CSV file, in place of simulated ratings")
options = parser.parse_args()

# All tasks run this program. Workers and parameter servers serve the chief until the launcher ends them.
if "TF_CONFIG" in os.environ:
    resolver = rx.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id).join()
else:
    local = [Server.create_local_server().target.removeprefix("grpc://") for _ in range(options.workers + 2)]
    spec = rx.ClusterSpec({"worker": local[:-2], "ps": local[-2:]})
    resolver = rx.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")


def simulate_ratings(users=3000, films=1000, per_user=100):
    """Return the users, films and stars of ratings, and how much users like genres, `[users, genres]`."""
    rng = np.random.default_rng(0)
    likes, taste = rng.normal(0, 0.7, (users, len(GENRES))), rng.normal(0, 0.2, (users, 4))
    mildness, quality, style = rng.normal(0, 0.3, users), rng.normal(0, 0.4, films), rng.normal(0, 1, (films, 4))
    user = np.repeat(np.arange(users), per_user)
    fame = 1 / np.arange(20, films + 20)
    film = rng.choice(films, users * per_user, p=rng.permutation(fame / fame.sum()))
    stars = 3.2 + mildness[user] + quality[film] + likes[user, film % len(GENRES)]
    stars += np.sum(taste[user] * style[film], axis=1) + rng.normal(0, NOISE, len(user))
    return user, film, np.clip(stars, 0.5, 5), likes


def ratings():
    """Return the training ratings and the test ratings, as arrays of users, films and stars."""
    if options.ratings:
        columns = np.loadtxt(options.ratings, delimiter=",", skiprows=1, usecols=(0, 1, 2)).T
        users, films = (np.unique(ids, return_inverse=True)[1] for ids in columns[:2])
        stars = columns[2]
    else:
        users, films, stars, _ = simulate_ratings()
    order = np.random.default_rng(0).permutation(len(stars))
    arrays = users.astype(np.int32), films.astype(np.int32), stars.astype(np.float32)
    cut = len(stars) // 10
    return [array[order[cut:]] for array in arrays], [array[order[:cut]] for array in arrays]


def batches():
    """Return the dataset of one worker, which calls this itself: the data are not sent to it."""
    train, _ = ratings()
    rng = np.random.default_rng(int(experimental_get_current_worker_index()))

    def draw():
        while True:
            rows = rng.integers(0, len(train[0]), BATCH)
            yield tuple(array[rows] for array in train)

    specs = tuple(rx.TensorSpec([BATCH], dtype) for dtype in (jnp.int32, jnp.int32, jnp.float32))
    return rx.data.Dataset.from_generator(draw, output_signature=specs).prefetch(2)


train, test = ratings()
users, films = (int(max(train[i].max(), test[i].max())) + 1 for i in range(2))
average = train[2].mean()

strategy = rx.ParameterServerStrategy(resolver, rx.experimental.partitioners.FixedShardsPartitioner(2))
coordinator = ClusterCoordinator(strategy)
with strategy.scope():  # a row for each user and each film, with a bias in the last column
    keys = jax.random.split(jax.random.key(0))
    user_table = rx.Variable(0.1 * jax.random.normal(keys[0], (users, WIDTH + 1)), name="users")
    film_table = rx.Variable(0.1 * jax.random.normal(keys[1], (films, WIDTH + 1)), name="films")
    optimizer = rx.Optimizer(optax.adam(optax.cosine_decay_schedule(0.02, options.steps)), [user_table, film_table])


def predict(user, film):
    """Return the stars that users give films, from their rows."""
    return average + user[..., -1] + film[..., -1] + jnp.sum(user[..., :-1] * film[..., :-1], axis=-1)


@rx.function
def train_step(iterator):
    user, film, stars = next(iterator)
    with rx.GradientTape() as tape:
        user_rows, film_rows = user_table.value()[user], film_table.value()[film]  # only these rows travel
        error = jnp.mean((predict(user_rows, film_rows) - stars) ** 2)
        loss = error + 0.03 * jnp.mean(jnp.sum(user_rows**2, axis=1) + jnp.sum(film_rows**2, axis=1))
    optimizer.apply_gradients(tape.gradient(loss, [user_table, film_table]))
    return error


@rx.function
def sum_squared_errors(user, film, stars):
    return jnp.sum((predict(user_table.value()[user], film_table.value()[film]) - stars) ** 2)


def test_error():
    """Return the root mean squared error over the test ratings. Free workers compute the sums of four parts."""
    parts = zip(*(np.array_split(array, 4) for array in test))
    sums = coordinator.fetch([coordinator.schedule(sum_squared_errors, args=part) for part in parts])
    return np.sqrt(sum(sums) / len(test[2]))


print(f"{len(train[0]):,} ratings by {users:,} users of {films:,} films")
iterator = iter(coordinator.create_per_worker_dataset(batches))
for first in range(0, options.steps, 500):
    count = min(500, options.steps - first)
    losses = [coordinator.schedule(train_step, args=(iterator,)) for _ in range(count)]
    coordinator.join()
    mean = np.mean(coordinator.fetch(losses))
    print(f"step {first + count}: training error {np.sqrt(mean):.3f}, test error {test_error():.3f}", flush=True)


def averages(ids, values, count):
    """Return the average of the values of each id, and nearly 0 where there are few."""
    return np.bincount(ids, values, count) / (np.bincount(ids, minlength=count) + 5)


of_films = averages(train[1], train[2] - average, films)
of_users = averages(train[0], train[2] - average - of_films[train[1]], users)
baseline = average + of_films[test[1]] + of_users[test[0]]
print(f"test error of averages of users and films: {np.sqrt(np.mean((baseline - test[2]) ** 2)):.3f} stars")
print(f"test error of the recommender: {test_error():.3f} stars")
if not options.ratings:
    likes = simulate_ratings()[-1]
    user_rows, film_rows = user_table.numpy(), film_table.numpy()
    for user in range(3):
        stars = np.array(predict(user_rows[user], film_rows))
        stars[train[1][train[0] == user]] = -np.inf  # not again
        best = [f"{GENRES[film % 10]} #{film} ({stars[film]:.1f})" for film in np.argsort(-stars)[:5]]
        liked = " and ".join(GENRES[genre] for genre in np.argsort(-likes[user])[:2])
        print(f"user {user}, who likes {liked}: {', '.join(best)}")
