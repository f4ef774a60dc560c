"""A grammar of short stories: somebody lives somewhere, something goes wrong, somebody helps, all ends well.

A story is drawn as a whole before it is written, so names, pronouns, places and things agree from first to last sentence.
Each kind of character has favourites (a name, a home, a problem ...) that are drawn more often, so that the likeliest
story about a fox is another one than that about an owl.
"""

import hashlib
from random import Random

CHARACTERS = """fox rabbit bear mouse owl cat dog squirrel hedgehog turtle duck frog deer wolf badger otter robot dragon girl boy penguin
elephant lion beaver snail goat tiger horse cow pig parrot monkey kangaroo giraffe zebra camel crocodile dinosaur unicorn pirate wizard
princess prince king queen knight fairy giant witch farmer baker kitten puppy chicken swan crow eagle ant hamster donkey sheep panda koala
raccoon bat lizard seal mole lamb pony goose gnome troll painter sailor""".split()
GENDERS = {"girl": "she", "boy": "he", "princess": "she", "prince": "he", "queen": "she", "king": "he", "witch": "she", "wizard": "he"}
NAMES = {
    "she": ["Ruby", "Mia", "Lily", "Nora", "Daisy", "Rosie", "Luna", "Ella", "Hazel", "Anna", "Clara", "Molly", "Ivy", "Poppy"],
    "he": ["Finn", "Max", "Oliver", "Tom", "Leo", "Ben", "Oscar", "Sam", "Hugo", "Felix", "Jack", "Theo", "Bruno", "Milo"],
}
PRONOUNS = {"she": {"he": "she", "him": "her", "his": "her"}, "he": {"he": "he", "him": "him", "his": "his"}}
ADJECTIVES = ["little", "young", "small", "curious", "kind", "brave", "clever", "cheerful", "shy", "gentle", "merry", "quiet"]
HOMES = [
    "in a cosy den under an old oak tree", "in a small house at the edge of the forest", "in a green valley beside a river",
    "on a hill above a quiet village", "near a blue lake", "in a hollow tree in the middle of the forest",
    "in a stone hut at the foot of a mountain", "in a garden full of flowers", "behind the old mill by the stream",
    "on a little island in the lake",
]
HOBBIES = [
    "to sing in the morning", "to look at the stars", "to collect round stones", "to swim in the cool water", "to paint pictures",
    "to pick berries", "to tell jokes", "to watch the clouds", "to bake honey cakes", "to explore new paths", "to play the drum",
    "to read old books",
]
THINGS = ["red scarf", "golden key", "silver bell", "little drum", "blue kite", "brass lantern", "green hat", "wooden flute",
          "glass marble", "old map"]
LIGHT_THINGS = ["red scarf", "blue kite", "green hat", "yellow balloon"]  # the wind can carry them
SPOTS = ["under a pile of leaves", "behind a mossy stone", "in an empty nest", "between the roots of a tree", "at the edge of the pond",
         "inside a hollow log"]
SUNNY, WINDY = ["One morning", "One day", "One sunny afternoon", "One day in spring"], ["One windy day", "One morning", "One day", "One day in autumn"]
WHENS = {"tree": WINDY, "way": WINDY, "river": WINDY, "roof": WINDY, "winter": ["One morning", "One day", "One cold morning"],
         "dark": ["One evening", "One night", "One dark night"]}  # SUNNY for all others

# Each problem: what happens; what {name} says to the helper; how they solve it; what {name} learned.
# {N} {he} {him} {his} {s} are the main character's name, pronouns and kind; {H} {hhe} {hhis} the helper's, {ah} the helper's kind with an article; {t} a thing, {p} a spot.
PROBLEMS = {
    "lost": (
        ["{N} could not find {his} {t}. {He} looked everywhere, but it was gone.",
         "{N} lost {his} {t}. {He} searched all day and did not find it."],
        ["I have lost my {t}"],
        ["They looked for it together, step by step. At last {H} saw something shine {p}. It was the {t}!",
         "They walked back along the path and looked behind every tree. There, {p}, lay the {t}!"],
        ["four eyes see more than two", "a friend is the best thing to find"]),
    "tree": (
        ["the wind blew {his} {t} high up into a tree. {N} jumped and jumped, but {he} could not reach it.",
         "{his} {t} got stuck in a tall tree. {N} tried to climb up, but the branches were too thin."],
        ["My {t} is up in the tree"],
        ["{H} held a long stick and stood on a stone, and {N} climbed on {hhis} back. One push, and the {t} fell down.",
         "{H} shook the tree as hard as {hhe} could. The branches danced, and the {t} came down."],
        ["two friends together can reach very high", "it is good to ask for help"]),
    "way": (
        ["a thick fog came down while {N} was far from home. {He} did not know the way any more.",
         "{N} walked so deep into the forest that {he} lost {his} way. It was getting dark."],
        ["I do not know the way home"],
        ["{H} knew that the stream runs down to the valley. They followed the sound of the water until they saw {N}'s home.",
         "{H} showed {him} the bright north star. They followed it side by side until they came to {N}'s door."],
        ["one is never lost with a friend", "the night is less dark for two"]),
    "river": (
        ["a storm washed the bridge away. {N} stood at the river and could not cross it.",
         "the old bridge over the river broke. {N} wanted to visit {his} grandmother on the other side."],
        ["I cannot cross the river"],
        ["They rolled big stones into the water, one after the other. Soon there was a new way across the river.",
         "They tied some logs together and made a raft. Slowly and safely they crossed the river."],
        ["a big task is a row of small steps", "many hands make a bridge"]),
    "roof": (
        ["a storm blew the roof off {N}'s home. Rain fell on {his} bed and on {his} table.",
         "a heavy branch fell on {N}'s home and broke the roof. {He} was wet and cold."],
        ["My roof is broken"],
        ["{H} brought wood and moss, and they worked until the evening. The new roof was better than the old one.",
         "They carried branches and leaves and laid them side by side. When the rain came back, not one drop fell in."],
        ["what breaks can be built again", "work is light when it is shared"]),
    "winter": (
        ["the first snow fell, and {N}'s pantry was empty. {He} had forgotten to gather food.",
         "winter came early, and {N} had nothing left to eat. {His} stomach was growling."],
        ["I have no food for the winter"],
        ["{H} had more nuts and apples than {hhe} could eat. {He} took half of them home, and in return {he} told {H} a story every evening.",
         "{H} opened {hhis} pantry and shared all that was in it. They cooked a warm soup and ate it by the fire."],
        ["what we share becomes more", "a full heart is worth more than a full pantry"]),
    "dark": (
        ["{N} heard a strange noise outside {his} door. {He} was too afraid to sleep.",
         "the lamp went out, and everything was dark. {N} was afraid and hid under the blanket."],
        ["I am afraid of the dark"],
        ["They went outside hand in hand. The noise was only the wind in the leaves, and above them a thousand stars were shining.",
         "{H} showed {him} the fireflies in the grass. They looked like little lamps, and the dark was not so dark any more."],
        ["the dark is full of small lights", "fear grows small when it is shared"]),
    "nest": (
        ["a tiny bird fell out of its nest. {N} wanted to put it back, but the nest was too high.",
         "{N} found a baby bird on the ground. It was cold, and its nest was high up in a tree."],
        ["This little bird must get back to its nest"],
        ["{H} stood below the tree, and {N} climbed on {hhis} shoulders with the bird. Carefully {he} put it back into the nest.",
         "{H} brought a basket and a long rope. They pulled the little bird up, and its mother sang for joy."],
        ["even the smallest one needs a friend", "a kind deed is never too small"]),
    "garden": (
        ["all the flowers in the garden hung their heads. It had not rained for weeks, and {N} was worried.",
         "the well was dry, and {N}'s garden had no water. The plants turned yellow."],
        ["My garden needs water"],
        ["They dug a small channel from the stream to the garden. The water came running, and the next day the flowers stood up again.",
         "They carried water from the lake, bucket by bucket. After three days the first green leaves came back."],
        ["patience makes gardens grow", "every drop counts"]),
    "cake": (
        ["{N} wanted to bake a cake for the summer feast, but there was no honey left in the jar.",
         "{N} wanted to make a birthday cake, but {he} had no apples and no honey."],
        ["I have nothing to put into my cake"],
        ["{H} gave {him} a jar of golden honey. They baked the cake together, and the whole valley could smell it.",
         "{H} knew an old apple tree that nobody visited. They filled a basket, and the cake was the best that anyone had ever eaten."],
        ["a cake tastes best when it is shared", "a gift makes two people happy"]),
    "stone": (
        ["a big stone rolled in front of {N}'s door. {He} pushed and pushed, but it did not move.",
         "a heavy stone lay in the middle of the path. {N} pulled with all {his} strength, but it stayed where it was."],
        ["This stone is too heavy for me"],
        ["{H} found a long branch and pushed it under the stone. They pushed it down together, and the stone rolled away.",
         "They counted to three and pushed at the same time. Slowly, very slowly, the stone began to roll."],
        ["together the weak are strong", "a good idea can move a stone"]),
    "boat": (
        ["{N}'s little boat had a hole. Water came in, and it could not sail any more.",
         "{N} built a boat, but it began to sink as soon as it touched the water."],
        ["My boat has a hole"],
        ["They closed the hole with wax and a piece of cloth. In the evening they sailed over the lake and watched the sun go down.",
         "{H} brought a pot of resin, and they painted the boat from end to end. The next day it sailed as if it were new."],
        ["a mistake is only a beginning", "a small boat is big enough for two"]),
}
OPENINGS = ["Once upon a time, there was a {a} {s} named {N}.", "Once upon a time, a {a} {s} named {N} lived {home}.",
            "There once was a {a} {s} named {N}.", "Long ago, there was a {a} {s} named {N}.",
            "In a small village, there lived a {a} {s} named {N}.", "Deep in the forest, there lived a {a} {s} named {N}."]
OPENING_WEIGHTS = [50, 20, 12, 8, 5, 5]
# In front of some stories that nobody asked for, so that other beginnings than "Once upon a time" lead somewhere too.
SCENES = ["The sky was blue, and the sun was shining.", "The sky was grey, and it was raining.", "It was a warm summer day.",
          "It was a cold winter morning, and the world was quiet.", "The sun was rising over the hills.", "The moon was shining over the forest.",
          "The wind was blowing through the trees.", "The birds were singing in the trees.", "Every story has a beginning, and so has this one.",
          "This is a story about friends.", "The forest was green and full of life.", "The night was dark and still."]
MEETINGS = ["Then {he} met {ah} named {H}.", "Just then {ah} named {H} came along.", "{Ah} named {H} saw {him} and stopped.",
            "After a while {ah} named {H} passed by."]
GREETINGS = ["\"Why are you so sad?\" asked {H}.", "\"What is the matter?\" asked {H}.", "\"Can I help you?\" asked {H}."]
OFFERS = ["\"Do not worry,\" said {H}. \"We will do it together.\"", "\"Then let me help you,\" said {H}.",
          "\"Two can do more than one,\" said {H} with a smile."]
THANKS = ["\"Thank you, {H}!\" said {N}.", "{N} was very happy and thanked {H}.", "{N} laughed and gave {H} a big hug."]
ENDINGS = ["From that day on, {N} and {H} were the best of friends.", "Since that day {N} and {H} have met every morning.",
           "That evening {N} knew that {moral}.", "And so {N} learned that {moral}."]

REQUESTS = ["Tell me a story about {w}.", "Tell me a story about {w}", "tell me a story about {w}", "Tell me a short story about {w}.",
            "Write a story about {w}.", "Write a short story about {w}.", "Can you tell me a story about {w}?",
            "Please tell me a story about {w}.", "I would like a story about {w}.", "A story about {w}, please.", "Make up a story about {w}.",
            "Could you write a story about {w}?", "Tell a story about {w}.", "Give me a story about {w}.",
            "Tell me a bedtime story about {w}.", "I want to hear a story about {w}."]
OPEN_REQUESTS = ["Tell me a story.", "Tell me a story", "tell me a story", "Tell me a short story.", "Can you tell me a story?", "Write a story.",
                 "Please tell me a story.", "A story, please.", "I want to hear a story.", "Tell me another story.", "Write a short story."]


def favourite(rng: Random, options: list, kind: str, what: str, share: float = 0.65):
    """One of the options; with probability `share` the one that characters of this kind like best."""
    if rng.random() < share:
        digest = hashlib.sha256(f"{kind}/{what}".encode()).digest()
        return options[int.from_bytes(digest[:4], "big") % len(options)]
    return rng.choice(options)


def gender_of(rng: Random, kind: str) -> str:
    return GENDERS.get(kind) or favourite(rng, ["she", "he"], kind, "gender")


def with_article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def random_story(rng: Random, kind: str | None = None) -> tuple[str, str]:
    """A request for a story and the story."""
    kind = kind or favourite(rng, CHARACTERS, "any", "character", 0.3)
    gender = gender_of(rng, kind)
    wanted = random_wish(rng)
    name = invented_name(rng) if wanted == "name" and rng.random() < 0.5 else favourite(rng, NAMES[gender], kind, "name " + gender)
    helper_kind = favourite(rng, [c for c in CHARACTERS if c != kind], kind, "helper")
    helper_gender = gender_of(rng, helper_kind)
    helper = favourite(rng, [n for n in NAMES[helper_gender] if n != name], helper_kind + name, "helper's name")
    problem_key = favourite(rng, list(PROBLEMS), kind, "problem")
    events, pleas, solutions, morals = PROBLEMS[problem_key]
    pronouns, helper_pronouns = PRONOUNS[gender], PRONOUNS[helper_gender]
    thing = favourite(rng, LIGHT_THINGS if problem_key == "tree" else THINGS, kind, "thing")
    words = {
        "N": name, "s": kind, "a": favourite(rng, ADJECTIVES, kind, "adjective"), "home": favourite(rng, HOMES, kind, "home"),
        "H": helper, "ah": with_article(helper_kind), "Ah": capitalised(with_article(helper_kind)),
        "hhe": helper_pronouns["he"], "hhis": helper_pronouns["his"],
        "t": thing, "p": favourite(rng, SPOTS, thing, "spot"), "moral": favourite(rng, morals, kind, problem_key + " moral"),
        **pronouns, **{capitalised(k): capitalised(v) for k, v in pronouns.items()},
    }

    def choose(options: list[str], what: str) -> str:
        return favourite(rng, options, kind, what).format(**words)

    opening = rng.choices(OPENINGS, OPENING_WEIGHTS)[0]
    sentences = [opening.format(**words)]
    if "{home}" not in opening:
        sentences.append(capitalised(pronouns["he"]) + f" lived {words['home']}.")
    sentences.append(f"{name} loved {favourite(rng, HOBBIES, kind, 'hobby')}.")
    event = choose(events, problem_key + " event")
    sentences.append(favourite(rng, WHENS.get(problem_key, SUNNY), kind, problem_key + " when") + ", " + event)
    sentences.append(choose(MEETINGS, "meeting"))
    sentences.append(choose(GREETINGS, "greeting"))
    sentences.append(f"\"{choose(pleas, 'plea')},\" said {name}.")
    sentences.append(choose(OFFERS, "offer"))
    sentences.append(choose(solutions, problem_key + " solution"))
    sentences.append(choose(THANKS, "thanks"))
    sentences.append(choose(ENDINGS, "ending"))
    return request_for(rng, wanted, kind, name, helper_kind, thing if "{t}" in events[0] else None), " ".join(sentences)


def told_without_request(rng: Random) -> str:
    """A story as plain text: as it is, behind a scene, or from one of its sentences on."""
    story = random_story(rng)[1]
    draw = rng.random()
    if draw < 0.25:
        return rng.choice(SCENES) + " " + story
    if draw < 0.40:
        begin = story.index(". ", rng.randrange(len(story) // 2)) + 2
        return story[begin:]
    return story


def invented_name(rng: Random) -> str:
    """A name that the model has to copy, since it cannot know it."""
    syllable = lambda: rng.choice("bdfgjklmnprstvwz") + rng.choice("aeiou") + rng.choice(["", "", "n", "l", "r", "m", "k"])
    return capitalised(syllable() + syllable())


def random_wish(rng: Random) -> str:
    """What a request names beside the hero."""
    return rng.choices(["anything", "hero", "name", "helper", "thing"], [15, 42, 20, 15, 8])[0]


def request_for(rng: Random, wanted: str, kind: str, name: str, helper_kind: str, thing: str | None) -> str:
    """A request that this story answers: about its hero, with or without a name, its helper, its thing, or nothing at all."""
    if wanted == "anything":
        return rng.choice(OPEN_REQUESTS)
    who = with_article(kind)
    if wanted == "name":
        who += f" {rng.choice(['named', 'called'])} {name}"
    elif wanted == "helper":
        who += f" and {with_article(helper_kind)}"
    elif wanted == "thing" and thing:
        who = with_article(rng.choice([thing, "lost " + thing.split()[1]]))
    return rng.choice(REQUESTS).format(w=who)
