// Each keyword is enforced, harmless or refused by name with its path; limits have names.
#include <gtest/gtest.h>

#include "nanovllm/error.h"

#include "constrain/ebnf_check.h"

namespace nanovllm {
namespace {

/// Why a schema is refused; empty where it is not.
std::string refusal(const std::string& schema) {
  try {
    (void)schema_to_ebnf(schema);
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
    return error.what();
  }
}

std::string repeated(const std::string& text, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

TEST(SchemaCheck, KeywordsThatAreEnforcedAreAccepted) {
  for (
      const char* schema :
      {R"({})",
       R"(true)",
       R"({"type": ["string", "null"]})",
       R"({"enum": [1, "a", null, {"b": []}]})",
       R"({"const": 5})",
       R"({"minimum": 1, "exclusiveMaximum": 2.5})",
       R"({"type": "integer", "multipleOf": 3})",
       R"({"type": "string", "minLength": 1, "maxLength": 5})",
       R"({"pattern": "^a+$"})",
       R"({"format": "date-time"})",
       R"({"items": {"type": "integer"}, "minItems": 1, "maxItems": 3})",
       R"({"prefixItems": [true, {"type": "null"}]})",
       R"({"properties": {"a": true}, "required": ["a", "b"]})",
       R"({"additionalProperties": {"type": "string"}})",
       R"({"propertyNames": {"maxLength": 3}})",
       R"({"patternProperties": {"^x": true}, "additionalProperties": false})",
       R"({"minProperties": 1, "maxProperties": 2})",
       R"({"anyOf": [{"type": "string"}, {"type": "null"}]})",
       R"({"allOf": [{"type": "string"}, {"maxLength": 3}]})",
       R"({"oneOf": [{"type": "string"}, {"type": "null"}]})",
       R"({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}})",
       R"({"properties": {"a": true}, "unevaluatedProperties": false})"})
    EXPECT_EQ(refusal(schema), "") << schema;
}

TEST(SchemaCheck, AnnotationsAreHarmless) {
  for (const char* keyword :
       {"title", "description", "default", "examples", "example", "deprecated", "readOnly",
        "writeOnly", "$comment", "contentEncoding", "discriminator", "x-anything"})
    EXPECT_EQ(refusal(std::string("{\"type\": \"string\", \"") + keyword + "\": 1}"), "")
        << keyword;
}

struct Refused {
  const char *schema, *message;
};

TEST(SchemaCheck, WhatIsNotEnforcedIsRefusedByItsPath) {
  for (const auto& [schema, message] : std::vector<Refused>{
           {R"({"properties": {"a": {"not": {}}}})", "json: #/properties/a/not is not supported"},
           {R"({"items": {"uniqueItems": true}})", "json: #/items/uniqueItems is not supported"},
           {R"({"if": {}, "then": {}})", "json: #/if is not supported"},
           {R"({"contains": {}})", "json: #/contains is not supported"},
           {R"({"dependentRequired": {"a": ["b"]}})", "json: #/dependentRequired is not supported"},
           {R"({"dependentSchemas": {}})", "json: #/dependentSchemas is not supported"},
           {R"({"nullable": true})", "json: #/nullable is not supported"},
           {R"({"type": "array", "items": [{}]})", "json: #/items must be a schema"},
           {R"({"additionalItems": false})", "json: #/additionalItems is not supported"},
           {R"({"$dynamicRef": "#a"})", "json: #/$dynamicRef is not supported"},
           {R"({"$ref": "http://a/b"})", "json: #/$ref leads out of the schema"},
           {R"({"$ref": "#/a/b"})", "json: #/$ref leads nowhere"},
           {R"({"allOf": [{"$ref": "#"}]})", "json: # refers to itself"},
           {R"({"anyOf": [{"type": "null"}, {"madeUp": 1}]})",
            "json: #/anyOf/1/madeUp is not a keyword that can be enforced"},
           {R"({"format": "regex"})", "json: #/format is not one that is enforced"},
           {R"({"oneOf": [{"type": "string"}, {"maxLength": 3}]})",
            "json: #/oneOf has branches 0 and 1"},
           {R"({"pattern": "(?=a)b"})", "looks around with (?="},
           {R"({"pattern": "a\\b"})", "\\b"},
           {R"({"pattern": "ab*", "maxLength": 3})",
            "json: #/maxLength is not implied by the pattern"},
           {R"({"type": "number", "multipleOf": 0.1})",
            "json: #/multipleOf must be a whole number"},
           {R"({"$schema": "http://json-schema.org/draft-04/schema#"})",
            "json: #/$schema is a dialect"},
           {R"({"type": "strin"})", "json: #/type must be a type's name"},
           {R"({"required": "a"})", "json: #/required must be a list of strings"},
           {R"({"minLength": -1})", "json: #/minLength must be an integer from 0 on"},
           {R"({"patternProperties": {"a": true}})",
            "is supported beside additionalProperties: false"},
           {R"({"allOf": [{"properties": {"a": true}}], "unevaluatedProperties": false})",
            "json: #/unevaluatedProperties is not supported beside allOf"},
           {R"([])", "a schema must be an object or a boolean"}})
    EXPECT_NE(refusal(schema).find(message), std::string::npos)
        << schema << ": " << refusal(schema);
}

TEST(SchemaCheck, WhatAsksForNothingIsAccepted) {
  for (const char* schema :
       {R"({"uniqueItems": false})", R"({"nullable": false})", R"({"then": false})",
        R"({"if": {"made": "up"}})", R"({"unevaluatedItems": true, "allOf": [true]})"})
    EXPECT_EQ(refusal(schema), "") << schema;
}

TEST(SchemaCheck, ASchemaThatNothingSatisfiesIsRefused) {
  for (const char* schema :
       {"false", R"({"enum": []})", R"({"type": "integer", "minimum": 2, "maximum": 1})",
        R"({"allOf": [{"type": "string"}, {"type": "null"}]})", R"({"type": "string", "const": 1})",
        R"({"type": "object", "required": ["a"], "properties": {"a": false}})",
        R"({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}})",
        R"({"type": "array", "minItems": 2, "maxItems": 1})"})
    EXPECT_EQ(refusal(schema), "json: no text can satisfy it") << schema;
}

TEST(SchemaCheck, EveryLimitHasItsName) {
  const std::string deep = repeated("{\"items\": ", 70) + "{}" + repeated("}", 70);
  EXPECT_NE(refusal(deep), "");
  std::string properties, values;
  for (int i = 0; i < 2001; ++i) properties += "\"p" + std::to_string(i) + "\": true,";
  for (int i = 0; i < 5001; ++i) values += std::to_string(i) + ",";
  properties.pop_back();
  values.pop_back();
  EXPECT_NE(refusal("{\"properties\": {" + properties + "}}").find("kMaxProperties"),
            std::string::npos);
  EXPECT_NE(refusal("{\"enum\": [" + values + "]}").find("kMaxEnumValues"), std::string::npos);
  EXPECT_NE(refusal(R"({"type": "string", "maxLength": 10001})").find("kMaxRepetitions"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"type": "array", "minItems": 10001})").find("kMaxRepetitions"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"pattern": "(a{200}){200}"})").find("kMaxRepetitions"), std::string::npos);
  const std::string options = repeated(R"({"type": "null"},)", 20) + R"({"type": "null"})";
  EXPECT_NE(refusal("{\"allOf\": [{\"anyOf\": [" + options + "]}, {\"anyOf\": [" + options + "]}]}")
                .find("kMaxAlternatives"),
            std::string::npos);
}

}  // namespace
}  // namespace nanovllm
